"""How long the KV of a prompt will take, from what was measured, and what that means. Pure.

A transfer of B bytes in n descriptors takes what B bytes take in one piece (interpolated between the sizes that were
measured, beyond them by the bandwidth between the two largest), and on top, for each descriptor, what the scattered
transfers took longer than those in one piece. Pairs of ranks work at the same time, so the slowest pair counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from kvferry.doctor.path import OPS, Op, Way, bytes_text, get_over_put, seconds_text
from kvferry.protocol.messages import Point
from kvferry.protocol.plan import Plan, plan

Verdict = Literal["push", "pull", "stay colocated", "none"]

PIECE_BYTES = 4096
"""One piece of the scattered transfers that are measured."""

_SHARE = 0.5
"""A transfer may take this much of the TTFT objective: the rest is for queueing, prefill and the first decode step."""
_CLEARLY = 1.5
"""Push is preferred unless its PUTs take this many times as long as GETs: a pull begins a round trip later."""
_SAMPLE_BLOCKS = 64


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One direction, over all pairs of ranks of two engines. Seconds for whole prompts in one piece per plane
    (`best_s`) and with no two blocks adjacent (`worst_s`)."""

    op: Op
    prompt_tokens: int
    total_bytes: int
    best_s: float
    worst_s: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to do and why, in one sentence."""

    verdict: Verdict
    reason: str
    disappoints: bool


def predict(ways: Sequence[Way], prompt_tokens: int) -> list[Prediction]:
    """Both directions, of pairs whose probes went well. Empty if one of them has too little to go by."""
    out = []
    for op in OPS:
        bests, worsts, total = [], [], 0
        for way in ways:
            whole, pieces = way.series(op, False), way.series(op, True)
            if way.share is None or not whole or not pieces:
                return []
            nbytes, fewest, most = amount(way, prompt_tokens)
            each = per_descriptor(whole, pieces)
            base = duration(whole, nbytes)
            bests.append(base + fewest * each)
            worsts.append(base + most * each)
            total += nbytes
        if not ways:
            return []
        out.append(
            Prediction(
                op=op,
                prompt_tokens=prompt_tokens,
                total_bytes=total,
                best_s=max(bests),
                worst_s=max(worsts),
            )
        )
    return out


def amount(way: Way, prompt_tokens: int) -> tuple[int, int, int]:
    """(bytes, descriptors at best, descriptors at worst) between these two ranks, by the planner itself: on a sample of
    blocks, scaled up. Raises `PlanError` for layouts that don't fit."""
    large = max(way.src.block_size, way.dst.block_size)
    blocks = -(-prompt_tokens // large)
    room = min(one.num_blocks * one.block_size for one in (way.src, way.dst)) // (2 * large)
    count = max(1, min(_SAMPLE_BLOCKS, blocks, room))
    apart, joined, half = _sample(way, count * large, 2 if room else 1), _sample(way, count * large, 1), count // 2
    merges = half and _sample(way, half * large, 1).descriptors == joined.descriptors
    scale = blocks / count
    fewest = joined.descriptors if merges else joined.descriptors * scale
    return round(apart.total_bytes * scale), round(fewest), round(apart.descriptors * scale)


def _sample(way: Way, tokens: int, step: int) -> Plan:
    """`step` 1: neighbouring blocks, 2: every other one."""
    assert way.share is not None
    src, dst = (range(0, step * (tokens // one.block_size), step) for one in (way.src, way.dst))
    return plan(way.src, way.dst, way.share, src, dst, 0, tokens)


def duration(whole: Sequence[Point], nbytes: float) -> float:
    """Seconds for so many bytes in one piece. `whole`: one or more points, by size."""
    first, last = whole[0], whole[-1]
    if nbytes <= first.nbytes:
        return first.median_s
    for low, high in pairwise(whole):
        if nbytes <= high.nbytes:
            part = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
            return low.median_s + part * (high.median_s - low.median_s)
    before = whole[-2] if len(whole) > 1 else None
    slope = last.median_s / last.nbytes
    if before is not None and last.median_s > before.median_s:
        slope = (last.median_s - before.median_s) / (last.nbytes - before.nbytes)
    return last.median_s + (nbytes - last.nbytes) * slope


def per_descriptor(whole: Sequence[Point], pieces: Sequence[Point]) -> float:
    """Seconds that each further descriptor costs, by the largest scattered transfer; from 0 up."""
    last = pieces[-1]
    count = -(-last.nbytes // PIECE_BYTES)
    return max(0.0, last.median_s - duration(whole, last.nbytes)) / count


def advise(ways: Sequence[Way], predictions: Sequence[Prediction], ttft_ms: float | None) -> Advice:
    """Push, pull, or no disaggregation over this path."""
    if not predictions:
        return Advice(verdict="none", reason="nothing could be measured", disappoints=False)
    get, put = (next(one for one in predictions if one.op == op) for op in OPS)
    pull = any((get_over_put(way) or 1.0) < 1 / _CLEARLY for way in ways)
    chosen = get if pull else put
    mode: Verdict = "pull" if pull else "push"
    what = f"the KV of {chosen.prompt_tokens} tokens ({bytes_text(chosen.total_bytes)}) takes "
    what += f"{span(chosen)} by {chosen.op}"
    why = "PUT is clearly the slower way" if pull else "and starts without a round trip"
    if ttft_ms is None:
        return Advice(verdict=mode, reason=f"{what}, {why}", disappoints=False)
    limit_s = ttft_ms / 1e3 * _SHARE
    goal = f"half of the TTFT objective of {ttft_ms:g} ms"
    if chosen.best_s > limit_s:
        reason = f"{what}, more than {goal}, even unfragmented: one engine that does both answers sooner"
        return Advice(verdict="stay colocated", reason=reason, disappoints=True)
    if chosen.worst_s > limit_s:
        reason = f"{what}: within {goal} as long as the blocks of a prompt lie together, beyond it when they don't"
        return Advice(verdict=mode, reason=reason, disappoints=True)
    return Advice(verdict=mode, reason=f"{what}, within {goal}", disappoints=False)


def span(one: Prediction) -> str:
    """Both bounds, or one where they read the same."""
    best, worst = seconds_text(one.best_s), seconds_text(one.worst_s)
    return best if best == worst else f"{best} to {worst}"
