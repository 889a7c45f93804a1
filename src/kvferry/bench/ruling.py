"""Which mode is the right one for a measured workload, by a rule that the report states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.bench.series import Series

MARGIN = 0.05
SIMPLEST = ("colocated", "pull", "push")
"""The order of operation: one engine; D chosen late; D chosen early."""
STAND_IN = ("pull-inline", "pull")
"""Pull that posts in the engine's loop stands for pull where that was not measured."""
RULE = (
    "At every workload that all modes were measured at, each mode's cost is its p90 TTFT over the best mode's, "
    "times its p99 ITL over the best mode's, square root taken: 1 is best at both. A mode's score is the geometric "
    f"mean of its costs over the workloads. The lowest score wins, unless a simpler mode is within {MARGIN:.0%} of "
    "it: then the simplest such mode wins. Colocated counts as simpler than pull, pull as simpler than push."
)
GOALS_RULE = (
    "At every workload that all modes were measured at, a mode's goodput is the number of requests per second that "
    "met both objectives. A mode's score is the sum of its goodput over the workloads. The highest score wins, "
    f"unless a simpler mode is within {MARGIN:.0%} of it: then the simplest such mode wins. Colocated counts as "
    "simpler than pull, pull as simpler than push."
)


@dataclass(frozen=True)
class Row:
    """One workload: cost, or goodput, of each mode, and which is best."""

    workload: tuple[float, int, int]
    values: dict[str, float]
    best: str


@dataclass(frozen=True)
class Ruling:
    """`mode` '': nothing can be said, `why` tells. `scores`: of all modes compared."""

    mode: str
    why: str
    scores: dict[str, float]
    rows: Sequence[Row]
    rule: str


def rule(series: Sequence[Series], objectives: tuple[float, float] | None) -> Ruling:
    """`objectives`: TTFT and ITL in milliseconds; without them latencies are weighed."""
    stated = RULE if objectives is None else GOALS_RULE
    measured = {entry.mode for entry in series}
    order = [STAND_IN[0] if mode == STAND_IN[1] and mode not in measured else mode for mode in SIMPLEST]
    by_workload: dict[tuple[float, int, int], dict[str, Series]] = {}
    for entry in series:
        if entry.mode in order:
            by_workload.setdefault((entry.qps, entry.input_len, entry.output_len), {})[entry.mode] = entry
    modes = [mode for mode in order if mode in measured]
    common = {key: there for key, there in sorted(by_workload.items()) if len(there) == len(modes)}
    if len(modes) < 2:
        return Ruling("", "it takes at least two of colocated, pull and push to compare", {}, [], stated)
    if not common:
        return Ruling("", f"no workload has a valid result in each of {', '.join(modes)}", {}, [], stated)
    rows = [_row(key, there, objectives) for key, there in common.items()]
    if objectives is None:
        scores = {m: math.exp(float(np.mean([math.log(row.values[m]) for row in rows]))) for m in modes}
        best = min(scores.values())
        near = [mode for mode in modes if scores[mode] <= best * (1 + MARGIN)]
    else:
        scores = {mode: sum(row.values[mode] for row in rows) for mode in modes}
        best = max(scores.values())
        if not best:
            return Ruling("", "no request of any mode met both objectives", scores, rows, stated)
        near = [mode for mode in modes if scores[mode] >= best * (1 - MARGIN)]
    chosen = near[0]
    why = _why(chosen, near, scores, rows)
    why += "".join(f"; {_against(chosen, mode, list(common.values()))}" for mode in modes if mode != chosen)
    if STAND_IN[0] in modes:
        why += f"; {STAND_IN[0]} stands for {STAND_IN[1]}, which was not measured"
    if len(rows) < len(by_workload):
        why += f"; workloads left out, without a valid result in each of these modes: {len(by_workload) - len(rows)}"
    return Ruling(chosen, why, scores, rows, stated)


def _row(key: tuple[float, int, int], there: dict[str, Series], objectives: tuple[float, float] | None) -> Row:
    if objectives is not None:
        good = {mode: entry.goodput(*objectives) for mode, entry in there.items()}
        return Row(key, good, max(good, key=lambda mode: good[mode]))
    ttft, itl = (_over_best(tails) for tails in _tails(there))
    costs = {mode: math.sqrt(ttft[mode] * itl[mode]) for mode in there}
    return Row(key, costs, min(costs, key=lambda mode: costs[mode]))


def _tails(there: dict[str, Series]) -> tuple[dict[str, float], dict[str, float]]:
    """p90 TTFT and p99 ITL of each mode, milliseconds; 0 where nothing was measured."""
    ttft = {mode: float(np.percentile(entry.ttft, 90)) for mode, entry in there.items()}
    return ttft, {mode: float(np.percentile(entry.itl or [0.0], 99)) for mode, entry in there.items()}


def _over_best(tails: dict[str, float]) -> dict[str, float]:
    """1 for all where one has none: nothing can be said then."""
    best = min(tails.values())
    return {mode: value / best if best else 1.0 for mode, value in tails.items()}


def _against(chosen: str, other: str, workloads: Sequence[dict[str, Series]]) -> str:
    """The two in numbers: the geometric mean of their ratios."""
    ratios: list[list[float]] = [[], []]
    for there in workloads:
        for found, tails in zip(ratios, _tails({mode: there[mode] for mode in (chosen, other)}), strict=True):
            found.append(tails[chosen] / tails[other] if tails[chosen] and tails[other] else 1.0)
    ttft, itl = (math.exp(float(np.mean(np.log(found)))) for found in ratios)
    return f"p90 TTFT and p99 ITL of {chosen} are {ttft:.2f} and {itl:.2f} times those of {other}"


def _why(chosen: str, near: Sequence[str], scores: dict[str, float], rows: Sequence[Row]) -> str:
    wins = sum(row.best == chosen for row in rows)
    listed = ", ".join(f"{mode} {score:.3g}" for mode, score in scores.items())
    text = f"scores: {listed}; {chosen} is best at {wins} of {len(rows)} workloads"
    if len(near) > 1:
        text += f"; {', '.join(near[1:])} {'is' if len(near) == 2 else 'are'} within {MARGIN:.0%}, and less simple"
    return text
