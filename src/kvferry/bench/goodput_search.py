"""The search for each mode's goodput: what a run at one rate says, and when the search ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.bench.goodput import SHARE, ModeResult, Objectives, Workload
from kvferry.bench.judge import Kind
from kvferry.bench.load import Load
from kvferry.bench.measure import Measured, Rules, job_of, measure
from kvferry.bench.pace import spoken
from kvferry.bench.points import OURS, Point
from kvferry.bench.records import VoidRun
from kvferry.bench.search import highest
from kvferry.bench.stats import summary
from kvferry.bench.target import Report, Setup, Target, indented, opened
from kvferry.errors import ConfigError, KVFerryError
from kvferry.launch.cancel import Cancel

NEAR = 0.9
"""A run with so many good ones misses by little."""
ALONE = 0.5
"""Requests in flight, on average, below which most had the engines for themselves."""
SLOW: tuple[Kind, ...] = ("late", "overrun")
"""What says that load generator or modelled engines can't keep a rate on this machine."""
SAY_S = 30.0


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
) -> Iterator[ModeResult]:
    """One deployment per mode, one after the other. Raises `ConfigError` and `Stopped`."""
    for mode in modes:
        report(f"{mode}: at most {goals.ttft_ms:g} ms TTFT and {goals.itl_ms:g} ms ITL for {SHARE:.0%} of requests")
        result = ModeResult(mode)
        try:
            with opened(setup, mode, state / mode, load, rules.prompts, indented(report), cancel) as target:
                Search(target, rules, work, goals, load, result, report, cancel).run()
        except ConfigError:
            raise
        except KVFerryError as error:
            result.rate, result.void = None, str(error)
            report(f"  void: {error}")
        yield result


@dataclass
class Search:
    """Of one mode. `why`: rate -> what made it break, where that is not the objectives."""

    target: Target
    rules: Rules
    work: Workload
    goals: Objectives
    load: Load
    result: ModeResult
    report: Report
    cancel: Cancel
    why: dict[float, str] = field(default_factory=dict)
    slow: set[float] = field(default_factory=set)

    def run(self) -> None:
        found = highest(self.holds, self.work.start, floor=self.work.floor, ceiling=self.work.ceiling)
        self.result.rate = found.rate
        broken = found.broken
        why = f": {self.why[broken]}" if broken in self.why else ""
        if broken is None:
            self.result.limit = f"the highest rate that was allowed, {self.work.ceiling:g} requests/s"
        elif broken in self.slow:
            if found.rate is None:
                raise VoidRun(f"{self.result.mode} at {broken:.3g} requests/s: {self.why[broken]}")
            self.result.limit = f"this machine, not the objectives{why}"
        elif found.rate is None:
            self.result.limit = f"even {broken:.3g} requests/s do not hold{why}"
        else:
            self.result.limit = f"{broken:.3g} requests/s do not hold{why}"

    def holds(self, rate: float) -> bool | None:
        """One miss by little may be a moment in which the machine did something else: it is tried once more."""
        held = self.probe(rate)
        if held is False and self.result.probes[-1]["share_within"] >= NEAR:
            held = self.probe(rate)
        return held

    def probe(self, rate: float) -> bool | None:
        """None: not even requests that ran alone were good."""
        num = self.work.num(self.rules.num, rate)
        self.why.pop(rate, None)
        self.slow.discard(rate)
        if num / rate > SAY_S:
            self.report(f"  {rate:.3g} requests/s: about {spoken(num / rate)}")
        number = len(self.result.probes) + 1
        point = Point(self.target.mode.name, rate, self.work.input_len, self.work.output_len, number)
        measured = _measured(self.target, replace(self.rules, num=num), self.load, point, self.report, self.cancel)
        samples, duration_s = measured.run.samples, measured.run.duration_s
        good = self.goals.good(samples)
        failed = [sample.error for sample in samples if sample.error]
        unable = [reason.text for reason in measured.reasons if reason.kind in SLOW]
        held: bool | None = good / len(samples) >= SHARE and not failed and not unable
        told = {
            "qps": rate,
            "num": len(samples),
            "holds": held,
            "share_within": round(good / len(samples), 4),
            "goodput_rps": round(good / duration_s, 4) if duration_s else 0.0,
            "requests_per_s": measured.facts[OURS]["requests_per_s"],
            "ttft_ms": measured.facts[OURS]["ttft_ms"],
            "tpot_ms": measured.facts[OURS]["tpot_ms"],
            "lag_ms": summary([sample.lag_ms for sample in samples]),
            "transfer": measured.facts[OURS]["transfer"],
        }
        self.result.probes.append(told)
        said = f"{told['share_within']:.1%} of {len(samples)} within both, {_times(told)}"
        if failed:
            self.why[rate] = f"{len(failed)} of {len(samples)} requests failed, the first: {failed[0]}"
        elif unable:
            self.slow.add(rate)
            self.why[rate] = unable[0]
        elif not good and sum(sample.e2e_ms for sample in samples) / 1e3 < ALONE * duration_s:
            self.why[rate] = "none was within, though most ran alone: a lower rate would not help"
            held = None
        self.report(f"  {rate:.3g} requests/s: {said}{f'; {self.why[rate]}' if not held and rate in self.why else ''}")
        return held


def _measured(target: Target, rules: Rules, load: Load, point: Point, report: Report, cancel: Cancel) -> Measured:
    """Raises `VoidRun` where the run says nothing of the objectives. Failed requests do: the rate is too high."""
    with tempfile.TemporaryDirectory(prefix="kvferry-log-") as scratch:
        job = job_of(target, rules, point, Path(scratch) / "log")
        measured = measure(target, load, job, point, cancel, lambda line: report(f"  {line}"))
    failed = sum(bool(sample.error) for sample in measured.run.samples)
    allowed = {"failed", *SLOW, *(("transfer",) if failed else ())}
    void = [reason.text for reason in measured.reasons if reason.kind not in allowed]
    if failed == len(measured.run.samples):
        void = [reason.text for reason in measured.reasons] or ["no request was sent"]
    if void:
        raise VoidRun(f"{point.mode} at {point.qps:.3g} requests/s: {void[0]}")
    return measured


def _times(told: dict[str, Any]) -> str:
    ttft, tpot = told["ttft_ms"]["p99"], told["tpot_ms"]["p99"]
    return "none answered" if ttft is None or tpot is None else f"p99 TTFT {ttft:.0f} ms, p99 ITL {tpot:.1f} ms"
