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
    for sample, request_id in zip(run.samples, run.request_ids, strict=False):
        sample.transfer_id = sample.transfer_id or stories.requests.get(request_id, "")
    mixed = job.kind == "mixed"
    reasons = answers(run.samples, job.num, None if mixed else job.input_len, job.output_len)
    reasons += [*generator(job, run), *engines(told, run.duration_s, prefixes=mixed)]
    warm = (run.warm_ups, max(job.warm_ups, run.warm_ups))
    wrong, transfer = moved(run.samples, job.input_len, mode, kv, stories, told, warm)
    return Account([*reasons, *wrong], transfer)


def answers(samples: Sequence[Sample], num: int, input_len: int | None, output_len: int) -> list[Reason]:
    """Of `num` requests with prompts of `input_len` tokens (None: as each sample says), each to be answered by
    `output_len`."""
    reasons: list[Reason] = []
    failed = [sample for sample in samples if sample.error]
    if failed:
        said = f"{len(failed)} of {len(samples)} requests failed, the first: {failed[0].error}, in {_who(failed[0])}"
        reasons.append(Reason("failed", said))
    if len(samples) != num:
        reasons.append(Reason("answers", f"{len(samples)} requests were sent, {num} were asked for"))
    good = [sample for sample in samples if not sample.error]
    empty = sum(not sample.tokens for sample in good)
    if empty:
        reasons.append(Reason("answers", f"{empty} of {len(samples)} answers have no token"))
    wrong = [sample.tokens for sample in good if sample.tokens not in (0, output_len)]
    if wrong:
        said = f"{len(wrong)} answers have not the {output_len} tokens asked for, the first has {wrong[0]}"
        reasons.append(Reason("answers", said))
    asked = [(s.prompt_tokens, s.input_len if input_len is None else input_len) for s in good]
    lengths = [(had, wanted) for had, wanted in asked if had is not None and had != wanted]
    if lengths:
        said = f"{len(lengths)} prompts have not {lengths[0][1]} tokens, the first has {lengths[0][0]}"
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


def engines(told: Told, duration_s: float, *, prefixes: bool = False) -> list[Reason]:
    """`prefixes`: prompts share them, and prefill may have them cached."""
    reasons: list[Reason] = []
    hits = told.cache_hits - ((told.tokens("prefill", "local_cache_hit") or 0.0) if prefixes else 0.0)
    if hits:
        said = f"a prefix cache served {hits:.0f} prompt tokens"
        reasons.append(Reason("cache", f"{said}: start the engines with --no-enable-prefix-caching"))
    for engine, late in told.late_s.items():
        if late > LATE_SHARE * duration_s:
            said = f"{engine} overran its timing model by {late:.2f} s, above {LATE_SHARE:.0%} of {duration_s:.1f} s"
            reasons.append(Reason("overrun", f"{said}: this machine is too slow or too busy for this load"))
    return reasons


def moved(
    samples: Sequence[Sample],
    input_len: int,
    mode: Mode,
    kv: KvFacts | None,
    stories: Stories,
    told: Told,
    warm_ups: tuple[int, int] = (0, 0),
) -> tuple[list[Reason], dict[str, Any]]:
    """Whether the KV of every prompt came from prefill: by the stories of the transfers, else by the engines' counters,
    which count warm-up requests too; `warm_ups`: those answered well, and those sent. Sets the samples' `moved_bytes`
    where that is known of each.
    """
    if not mode.split:
        for sample in samples:
            sample.moved_bytes = 0
        return [], {"by": "nothing moves in this mode", "moved_bytes": 0, "expected_bytes": 0}
    reasons: list[Reason] = []
    total, sent = (len(samples) + count for count in warm_ups)
    computed = told.tokens("decode", "local_compute")
    if computed is not None and computed > sent:
        said = f"decode computed {computed:.0f} prompt tokens of {sent} requests itself"
        reasons.append(Reason("transfer", f"{said}, one each is its share"))
    if mode.connector == "kvferry" and stories.told:
        wrong, facts = _by_story(samples, kv, stories)
        return reasons + wrong, facts
    external = told.tokens("decode", "external_kv_transfer")
    needed = total * (input_len - 1)
    facts = {"by": "engine counters, warm-up included", "moved_tokens": external, "expected_tokens": needed}
    if told.nixl_bytes is not None:
        facts["moved_bytes"] = told.nixl_bytes
        facts["expected_bytes"] = kv.needed(input_len) * total if kv else None
        if kv and told.nixl_bytes < kv.needed(input_len) * total:
            said = f"{told.nixl_bytes:.0f} bytes were moved, the prompts' KV has {facts['expected_bytes']}"
            reasons.append(Reason("transfer", said))
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


def _by_story(samples: Sequence[Sample], kv: KvFacts | None, stories: Stories) -> tuple[list[Reason], dict[str, Any]]:
    wrong: list[str] = []
    good = [sample for sample in samples if not sample.error]
    for sample in samples:
        transfer = stories.transfers.get(sample.transfer_id)
        sample.moved_bytes = transfer.moved_bytes if transfer else 0
        tokens = sample.prompt_tokens or sample.input_len
        if sample.error:
            continue
        if transfer is None:
            wrong.append(f"{_who(sample)} has no story")
        elif kv is not None and not kv.fits(transfer.moved_bytes, tokens):
            expected = f"{kv.expected(tokens)} were expected for {tokens} prompt tokens"
            wrong.append(f"{_who(sample)} moved {transfer.moved_bytes} bytes, {expected}")
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


def _who(sample: Sample) -> str:
    return f"request {sample.index}" + (f" (transfer {sample.transfer_id})" if sample.transfer_id else "")
