"""Whether a run is what it claims to be; each reason why it is not, in a line of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from kvferry.bench.kv import KvFacts
from kvferry.bench.load import Job, LoadRun
from kvferry.bench.records import Sample
from kvferry.bench.stats import summary
from kvferry.bench.witness import Stories, Told
from kvferry.launch.spec import Mode

LATE_SHARE = 0.02
"""Of the mean interval between requests that the median request may leave late; of the run's time that an engine with a
timing model may overrun it."""


Kind = Literal["broken", "failed", "answers", "warm-up", "late", "cache", "overrun", "transfer", "mode", "died"]


@dataclass(frozen=True)
class Reason:
    """`text`: one line."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Account:
    """`transfer`: for the result's file. `reasons`: why the run is void; none is a good run."""

    reasons: list[Reason]
    transfer: dict[str, Any]


def judge(job: Job, run: LoadRun, mode: Mode, kv: KvFacts | None, stories: Stories, told: Told) -> Account:
    if run.broken:
        return Account([Reason("broken", run.broken)], {})
    reasons = [*answers(job, run.samples), *generator(job, run), *engines(run, told)]
    wrong, transfer = moved(job, run, mode, kv, stories, told)
    return Account([*reasons, *wrong], transfer)


def answers(job: Job, samples: Sequence[Sample]) -> list[Reason]:
    reasons: list[Reason] = []
    if len(samples) != job.num:
        reasons.append(Reason("answers", f"{len(samples)} requests were sent, {job.num} were asked for"))
    failed = [sample for sample in samples if sample.error]
    if failed:
        reasons.append(
            Reason("failed", f"{len(failed)} of {len(samples)} requests failed, the first: {failed[0].error}")
        )
    good = [sample for sample in samples if not sample.error]
    empty = sum(not sample.tokens for sample in good)
    if empty:
        reasons.append(Reason("answers", f"{empty} of {len(samples)} answers have no token"))
    wrong = [sample.tokens for sample in good if sample.tokens not in (0, job.output_len)]
    if wrong:
        reasons.append(
            Reason(
                "answers",
                f"{len(wrong)} answers have not the {job.output_len} tokens asked for, the first has {wrong[0]}",
            )
        )
    lengths = [s.prompt_tokens for s in good if s.prompt_tokens is not None and s.prompt_tokens != job.input_len]
    if lengths:
        said = f"{len(lengths)} prompts have not {job.input_len} tokens, the first has {lengths[0]}"
        reasons.append(Reason("answers", f"{said} (do server and load generator use the same tokenizer?)"))
    return reasons


def generator(job: Job, run: LoadRun) -> list[Reason]:
    reasons: list[Reason] = []
    if job.warm_ups < 1:
        reasons.append(Reason("warm-up", "no warm-up request was asked for"))
    elif run.warm_ups < job.warm_ups:
        reasons.append(Reason("warm-up", f"{job.warm_ups - run.warm_ups} of {job.warm_ups} warm-up requests failed"))
    if not run.samples:
        return reasons
    if not run.lag_source:
        reasons.append(Reason("late", "nothing tells whether the load generator kept its times"))
        return reasons
    late, interval = median(sample.lag_ms for sample in run.samples), 1e3 / job.qps
    if late > LATE_SHARE * interval:
        said = f"the load generator was late: median {late:.2f} ms, above {LATE_SHARE:.0%} of the mean interval of"
        reasons.append(Reason("late", f"{said} {interval:.1f} ms"))
    return reasons


def engines(run: LoadRun, told: Told) -> list[Reason]:
    reasons: list[Reason] = []
    if told.cache_hits:
        said = f"a prefix cache served {told.cache_hits:.0f} prompt tokens"
        reasons.append(Reason("cache", f"{said}: start the engines with --no-enable-prefix-caching"))
    for engine, late in told.late_s.items():
        if late > LATE_SHARE * run.duration_s:
            said = (
                f"{engine} overran its timing model by {late:.2f} s, above {LATE_SHARE:.0%} of {run.duration_s:.1f} s"
            )
            reasons.append(Reason("overrun", f"{said}: this machine is too slow or too busy for this load"))
    return reasons


def moved(
    job: Job, run: LoadRun, mode: Mode, kv: KvFacts | None, stories: Stories, told: Told
) -> tuple[list[Reason], dict[str, Any]]:
    """Whether the KV of every prompt came from prefill: by the stories of the transfers, else by the engines' counters,
    which count warm-up requests too.
    """
    if not mode.split:
        return [], {"by": "nothing moves in this mode", "moved_bytes": 0, "expected_bytes": 0}
    reasons: list[Reason] = []
    total = len(run.samples) + run.warm_ups
    computed = told.tokens("decode", "local_compute")
    if computed is not None and computed > (sent := len(run.samples) + max(job.warm_ups, run.warm_ups)):
        said = f"decode computed {computed:.0f} prompt tokens of {sent} requests itself"
        reasons.append(Reason("transfer", f"{said}, one each is its share"))
    if mode.connector == "kvferry" and stories.told:
        wrong, facts = _by_story(run, kv, stories)
        return reasons + wrong, facts
    external = told.tokens("decode", "external_kv_transfer")
    needed = total * (job.input_len - 1)
    facts = {"by": "engine counters, warm-up included", "moved_tokens": external, "expected_tokens": needed}
    if told.nixl_bytes is not None:
        facts["moved_bytes"] = told.nixl_bytes
        facts["expected_bytes"] = kv.needed(job.input_len) * total if kv else None
        if kv and told.nixl_bytes < kv.needed(job.input_len) * total:
            reasons.append(
                Reason(
                    "transfer", f"{told.nixl_bytes:.0f} bytes were moved, the prompts' KV has {facts['expected_bytes']}"
                )
            )
    elif kv and external is not None:
        facts["expected_bytes"] = needed * kv.token_bytes
        facts["moved_bytes"] = external * kv.token_bytes
    if external is not None and external < needed:
        reasons.append(
            Reason("transfer", f"the KV of {external:.0f} prompt tokens came from prefill, {needed} are needed")
        )
    if external is None and told.nixl_bytes is None:
        reasons.append(
            Reason("transfer", "nothing tells whether KV moved: neither stories (--story-dir) nor the engines' metrics")
        )
    return reasons, facts


def _by_story(run: LoadRun, kv: KvFacts | None, stories: Stories) -> tuple[list[Reason], dict[str, Any]]:
    wrong: list[str] = []
    good = [sample for sample in run.samples if not sample.error]
    for index, sample in enumerate(run.samples):
        if not sample.transfer_id and index < len(run.request_ids):
            sample.transfer_id = stories.requests.get(run.request_ids[index], "")
        transfer = stories.transfers.get(sample.transfer_id)
        sample.moved_bytes = transfer.moved_bytes if transfer else 0
        tokens = sample.prompt_tokens or sample.input_len
        if sample.error:
            continue
        if transfer is None:
            wrong.append(f"request {sample.index} has no story")
        elif kv is not None and not kv.fits(transfer.moved_bytes, tokens):
            expected = f"{kv.expected(tokens)} were expected for {tokens} prompt tokens"
            wrong.append(
                f"request {sample.index} (transfer {sample.transfer_id}) moved {transfer.moved_bytes} bytes, {expected}"
            )
    transfers = [stories.transfers[s.transfer_id] for s in good if s.transfer_id in stories.transfers]
    exposed = [transfer.exposed_ms for transfer in transfers if transfer.exposed_ms is not None]
    facts = {
        "by": "stories",
        "transfers": len(transfers),
        "moved_bytes": sum(transfer.moved_bytes for transfer in transfers),
        "expected_bytes": sum(kv.expected(s.prompt_tokens or s.input_len) for s in good) if kv else None,
        "descriptors": summary([float(transfer.descriptors) for transfer in transfers]),
        "exposed_ms": summary(exposed),
    }
    if kv is None:
        wrong.append("how many bytes a prompt's KV has is not known here: name the model, --profile or --kv-bytes")
    more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
    return [Reason("transfer", text + more) for text in wrong[:1]], facts
