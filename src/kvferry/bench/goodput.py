"""Goodput: requests per second that meet both objectives, TTFT and ITL, at the highest rate at which enough of them do.

A request holds its TTFT objective if its first token came in time, and its ITL objective if its mean time between
tokens (its TPOT) is within it. A failed request holds neither.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.bench.judge import Kind
from kvferry.bench.load import Load
from kvferry.bench.measure import Measured, Rules, job_of, measure
from kvferry.bench.points import OURS, Point
from kvferry.bench.records import Sample, VoidRun
from kvferry.bench.search import highest
from kvferry.bench.stats import summary
from kvferry.bench.target import Report, Setup, Target, indented, opened
from kvferry.errors import ConfigError, KVFerryError
from kvferry.launch.cancel import Cancel

SHARE = 0.99
"""Of the requests of a run that must meet both objectives."""
SLOW: tuple[Kind, ...] = ("late", "overrun")
"""What says that load generator or modelled engines can't keep a rate on this machine."""


@dataclass(frozen=True)
class Objectives:
    """Milliseconds; both bounds are included."""

    ttft_ms: float
    itl_ms: float

    def met(self, sample: Sample) -> bool:
        if sample.error or not sample.tokens:
            return False
        return sample.ttft_ms <= self.ttft_ms and (sample.tpot_ms or 0.0) <= self.itl_ms

    def good(self, samples: Sequence[Sample]) -> int:
        return sum(self.met(sample) for sample in samples)


@dataclass(frozen=True)
class Workload:
    input_len: int
    output_len: int
    start: float = 1.0
    floor: float = 0.05
    ceiling: float = 256.0
    seconds: float = 10.0
    """A probe sends for at least so long."""

    def num(self, least: int, rate: float) -> int:
        return max(least, math.ceil(rate * self.seconds))


@dataclass
class ModeResult:
    """`rate`: the highest that held, None: none did. `limit`: what the search ended at."""

    mode: str
    rate: float | None = None
    limit: str = ""
    probes: list[dict[str, Any]] = field(default_factory=list)
    void: str = ""

    def best(self) -> dict[str, Any] | None:
        return next((probe for probe in self.probes if probe["qps"] == self.rate), None)

    def facts(self) -> dict[str, Any]:
        best = self.best()
        keys = ("goodput_rps", "share_within", "num", "requests_per_s", "ttft_ms", "tpot_ms")
        told = {key: best[key] for key in keys} if best else dict.fromkeys(keys)
        return {"mode": self.mode, "rate": self.rate, "limit": self.limit, "void": self.void, **told}


def search_modes(
    setup: Setup,
    modes: Sequence[str],
    rules: Rules,
    work: Workload,
    goals: Objectives,
    load: Load,
    state: Path,
    report: Report,
    cancel: Cancel,
) -> list[ModeResult]:
    """One deployment per mode, one after the other. Raises `ConfigError` and `Stopped`."""
    results = []
    for mode in modes:
        report(f"{mode}: at most {goals.ttft_ms:g} ms TTFT and {goals.itl_ms:g} ms ITL for {SHARE:.0%} of requests")
        result = ModeResult(mode)
        results.append(result)
        try:
            with opened(setup, mode, state / mode, load, rules.prompts, indented(report), cancel) as target:
                _search(target, rules, work, goals, load, result, report, cancel)
        except ConfigError:
            raise
        except KVFerryError as error:
            result.void = str(error)
            report(f"  void: {error}")
    return results


def _search(
    target: Target,
    rules: Rules,
    work: Workload,
    goals: Objectives,
    load: Load,
    result: ModeResult,
    report: Report,
    cancel: Cancel,
) -> None:
    slow: dict[float, str] = {}

    def holds(rate: float) -> bool:
        point = Point(target.mode.name, rate, work.input_len, work.output_len, len(result.probes) + 1)
        measured = _probe(target, replace(rules, num=work.num(rules.num, rate)), load, point, report, cancel)
        good = goals.good(measured.run.samples)
        share = good / len(measured.run.samples)
        told = {
            "qps": rate,
            "num": len(measured.run.samples),
            "share_within": round(share, 4),
            "goodput_rps": round(good / measured.run.duration_s, 4) if measured.run.duration_s else 0.0,
            "requests_per_s": measured.facts[OURS]["requests_per_s"],
            "ttft_ms": measured.facts[OURS]["ttft_ms"],
            "tpot_ms": measured.facts[OURS]["tpot_ms"],
            "lag_ms": summary([sample.lag_ms for sample in measured.run.samples]),
            "transfer": measured.facts[OURS]["transfer"],
        }
        result.probes.append(told)
        unable = [reason.text for reason in measured.reasons if reason.kind in SLOW]
        if unable and share >= SHARE:
            slow[rate] = unable[0]
            report(f"  {rate:.3g} requests/s: void: {unable[0]}")
            return False
        report(f"  {rate:.3g} requests/s: {share:.1%} of {told['num']} within both, {_times(told)}")
        return share >= SHARE

    found = highest(holds, work.start, floor=work.floor, ceiling=work.ceiling)
    result.rate = found.rate
    if found.broken in slow:
        result.limit = f"this machine, not the objectives: {slow[found.broken]}"
    elif found.rate is None:
        result.limit = f"even {work.floor:g} requests/s do not hold"
    elif found.broken is None:
        result.limit = f"the highest rate that was allowed, {work.ceiling:g} requests/s"
    else:
        result.limit = f"{found.broken:.3g} requests/s do not hold"


def _probe(target: Target, rules: Rules, load: Load, point: Point, report: Report, cancel: Cancel) -> Measured:
    """Raises `VoidRun` where the run says nothing of the objectives."""
    with tempfile.TemporaryDirectory(prefix="kvferry-log-") as scratch:
        job = job_of(target, rules, point, Path(scratch) / "log")
        measured = measure(target, load, job, point, cancel, lambda line: report(f"  {line}"))
    failed = sum(bool(sample.error) for sample in measured.run.samples)
    allowed = {"failed", "answers", *SLOW, *(("transfer",) if failed else ())}
    void = [reason.text for reason in measured.reasons if reason.kind not in allowed]
    if failed and failed == len(measured.run.samples):
        void = [reason.text for reason in measured.reasons]
    if void:
        raise VoidRun(f"{point.mode} at {point.qps:g} requests/s: {void[0]}")
    return measured


def _times(told: dict[str, Any]) -> str:
    ttft, tpot = told["ttft_ms"]["p99"], told["tpot_ms"]["p99"]
    return "none answered" if ttft is None or tpot is None else f"p99 TTFT {ttft:.0f} ms, p99 ITL {tpot:.1f} ms"
