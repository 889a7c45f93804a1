"""Whether a run was what it claims to be: right answers, and KV that really moved. Reads stories and engine metrics."""

from __future__ import annotations

import time
import urllib.error
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.records import Batch, Sample, Variant, VoidRun, expected_bytes
from kvferry.launch.spec import mode_named
from kvferry.launch.web import open_json
from kvferry.story import read_lines

SETTLE_S = 5.0
"""An engine's metrics follow its last step by moments; longer than this, and they will not come."""


@dataclass(frozen=True)
class Counters:
    """Since the engines started. None: these engines do not count it."""

    nixl_bytes: float | None
    computed_on_d: float | None
    """Prompt tokens that decode engines computed themselves."""

    def since(self, before: Counters) -> Counters:
        def less(now: float | None, then: float | None) -> float | None:
            return None if now is None else now - (then or 0.0)

        return Counters(less(self.nixl_bytes, before.nixl_bytes), less(self.computed_on_d, before.computed_on_d))


def read_counters(urls: Mapping[str, str]) -> Counters:
    """`urls`: engine's URL -> role. `nixl_bytes` is what vLLM's own NIXL connectors report, on the side that posts."""
    moved: float | None = None
    computed: float | None = None
    for url, role in urls.items():
        for name, labels, value in engine_metrics(url):
            if name == "vllm:nixl_bytes_transferred_sum":
                moved = (moved or 0.0) + value
            elif (
                role == "decode"
                and name == "vllm:prompt_tokens_by_source_total"
                and labels.get("source") == "local_compute"
            ):
                computed = (computed or 0.0) + value
    return Counters(moved, computed)


def engine_metrics(url: str) -> list[tuple[str, dict[str, str], float]]:
    try:
        with open_json(f"{url}/metrics", timeout_s=10.0) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return []
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


def settled(urls: Mapping[str, str], before: Counters, wanted_bytes: int) -> Counters:
    """What happened since `before`, once the engines have reported at least `wanted_bytes`, or `SETTLE_S` later."""
    until = time.monotonic() + SETTLE_S
    while True:
        now = read_counters(urls).since(before)
        if now.nixl_bytes is None or now.nixl_bytes >= wanted_bytes or time.monotonic() > until:
            return now
        time.sleep(0.2)


def add_story(folder: Path, samples: Sequence[Sample]) -> None:
    """Give each sample what the story of its transfer says: bytes posted, and the time of our hooks by side."""
    by_id = {sample.transfer_id: sample for sample in samples if sample.transfer_id}
    posted: defaultdict[str, int] = defaultdict(int)
    for line in read_lines(folder):
        sample = by_id.get(line["transfer_id"])
        if sample is None:
            continue
        if line["event"] == "posted":
            posted[sample.transfer_id] += int(line["nbytes"])
        elif line["event"] == "hooks":
            side = str(line["side"])
            sample.hooks_ms[side] = sample.hooks_ms.get(side, 0.0) + float(line["ms"])
    for transfer_id, sample in by_id.items():
        sample.moved_bytes = posted[transfer_id]


def check_answers(variant: Variant, samples: Sequence[Sample], output_tokens: int, log_hint: str) -> None:
    """Raises `VoidRun` for a failed request or one with the wrong number of tokens."""
    for sample in samples:
        where = f"{variant.label}: request {sample.index} ({sample.input_len} tokens"
        where += f", transfer {sample.transfer_id})" if sample.transfer_id else ")"
        if sample.error:
            raise VoidRun(f"{where} failed: {sample.error}", hint=log_hint)
        if sample.tokens != output_tokens:
            raise VoidRun(f"{where} got {sample.tokens} tokens, {output_tokens} were asked for", hint=log_hint)


def check_moved(batch: Batch, counted: Counters, kv_bytes: int, log_hint: str) -> None:
    """Raises `VoidRun` where KV did not move from P to D: less than the prompts' bytes, or D computed prompts itself.

    Sets the batch's `moved_bytes`: by our story, else by the engines' metrics. D computes at most the last token of
    each prompt; engines that do not count that are judged by the bytes alone.
    """
    mode = mode_named(batch.variant.mode)
    if not mode.split:
        batch.moved_bytes = 0
        return
    label, samples = batch.variant.label, batch.samples
    if mode.connector == "kvferry":
        for sample in samples:
            wanted = expected_bytes([sample], kv_bytes)
            if (sample.moved_bytes or 0) < wanted:
                moved = f"moved {sample.moved_bytes or 0} bytes, its prompt's KV has {wanted}"
                raise VoidRun(f"{label}: transfer {sample.transfer_id or '(none)'} {moved}", hint=log_hint)
        batch.moved_bytes = sum(sample.moved_bytes or 0 for sample in samples)
    elif counted.nixl_bytes is not None:
        batch.moved_bytes = int(counted.nixl_bytes)
        wanted = expected_bytes(samples, kv_bytes)
        if batch.moved_bytes < wanted:
            moved = f"moved {batch.moved_bytes} bytes, {len(samples)} prompts' KV has {wanted}"
            raise VoidRun(f"{label}: {batch.input_len}-token prompts: {moved}", hint=log_hint)
    elif counted.computed_on_d is None:
        raise VoidRun(f"{label}: the engines' metrics do not tell whether KV moved", hint=log_hint)
    if counted.computed_on_d is not None and counted.computed_on_d > len(samples):
        computed = f"decode computed {counted.computed_on_d:.0f} prompt tokens of {len(samples)} requests itself"
        raise VoidRun(f"{label}: {computed}", hint=log_hint)
