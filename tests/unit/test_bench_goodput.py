"""The search of one mode over runs that are made up: what holds, what is tried again, what is void, what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_parts import sample

from kvferry.bench import goodput_search
from kvferry.bench.goodput import ModeResult, Objectives, Workload
from kvferry.bench.goodput_command import table
from kvferry.bench.goodput_search import Search
from kvferry.bench.judge import Reason
from kvferry.bench.measure import Rules
from kvferry.bench.points import OURS
from kvferry.bench.records import Sample, VoidRun
from kvferry.bench.stats import summary
from kvferry.launch.cancel import Cancel

GOOD, BAD = 100.0, 900.0
Run = tuple[list[Sample], list[Reason]]


def run(good: int, bad: int, *reasons: Reason, failed: int = 0, e2e_ms: float = 2000.0) -> Run:
    samples = [sample(i, ttft_ms=GOOD, e2e_ms=e2e_ms) for i in range(good)]
    samples += [sample(i, ttft_ms=BAD, e2e_ms=e2e_ms) for i in range(bad)]
    samples += [sample(i, error="503: full", tokens=0) for i in range(failed)]
    return samples, list(reasons)


class Bench:
    """`answer(rate, times it was asked)` makes the runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[float, int], Run]) -> None:
        self.asked: list[float] = []
        self.said: list[str] = []
        self.result = ModeResult("push")

        def measure(target: Any, load: Any, job: Any, point: Any, cancel: Any, progress: Any) -> Any:
            self.asked.append(point.qps)
            samples, reasons = answer(point.qps, self.asked.count(point.qps))
            times = {"ttft_ms": summary([s.ttft_ms for s in samples]), "tpot_ms": summary([10.0])}
            facts = {OURS: {"requests_per_s": 1.0, "transfer": {}, **times}}
            return SimpleNamespace(run=SimpleNamespace(samples=samples, duration_s=100.0), reasons=reasons, facts=facts)

        monkeypatch.setattr(goodput_search, "measure", measure)
        monkeypatch.setattr(goodput_search, "job_of", lambda *args: None)
        target: Any = SimpleNamespace(mode=SimpleNamespace(name="push"))
        work, load = Workload(41, 4, start=1.0, floor=0.25, ceiling=8.0), SimpleNamespace(name="builtin")
        goals, rules = Objectives(500.0, 50.0), Rules(num=100)
        self.search = Search(target, rules, work, goals, load, self.result, self.said.append, Cancel())  # type: ignore[arg-type]

    def run(self) -> ModeResult:
        self.search.run()
        return self.result


def test_the_highest_rate_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda rate, times: run(99, 1) if rate <= 3.0 else run(50, 50))
    result = bench.run()
    assert result.rate is not None and 3.0 / 1.05 < result.rate <= 3.0
    best = result.best()
    assert best is not None and (best["share_within"], best["goodput_rps"]) == (0.99, 0.99)
    assert "do not hold" in result.limit
    assert len(set(bench.asked)) == len(bench.asked), "a clear miss needs no second look"


def test_a_miss_by_little_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else ran on the machine for a moment: the first run at each rate is hit by it."""
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if times == 2 else run(97, 3))
    result = bench.run()
    assert bench.asked == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    assert result.rate == 8.0
    best = result.best()
    assert best is not None and best["share_within"] == 1.0, "the run that held is the one that is told"


def test_a_miss_by_little_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if rate <= 1.0 else run(98, 2))
    assert bench.run().rate == 1.0
    assert bench.asked.count(2.0) == 2


def test_a_rate_at_which_requests_fail_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though 99% of its requests are good; and what failed moved no KV, which is no reason of its own."""
    reasons = (Reason("failed", "1 of 100 requests failed"), Reason("transfer", "request 99 has no story"))
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if rate <= 2.0 else run(99, 0, *reasons, failed=1))
    result = bench.run()
    assert result.rate == 2.0
    assert "1 of 100 requests failed, the first: 503: full" in result.limit


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (([], [Reason("answers", "0 requests were sent, 100 were asked for")]), "0 requests were sent"),
        (([], []), "no request was sent"),
        (run(100, 0, Reason("answers", "100 answers have no token")), "have no token"),
        (run(100, 0, Reason("answers", "3 answers have not the 4 tokens asked for")), "not the 4 tokens"),
        (run(100, 0, Reason("transfer", "moved 1 bytes, 2 were expected")), "moved 1 bytes"),
        (run(0, 0, Reason("failed", "100 of 100 requests failed"), failed=100), "100 of 100"),
        (run(100, 0, Reason("warm-up", "2 of 2 warm-up requests failed")), "warm-up"),
    ],
)
def test_a_void_run_says_nothing_of_the_objectives(monkeypatch: pytest.MonkeyPatch, made: Run, said: str) -> None:
    with pytest.raises(VoidRun, match=f"push at 1 requests/s: .*{said}"):
        Bench(monkeypatch, lambda rate, times: made).run()


def test_a_machine_that_is_too_slow_is_told_from_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Reason("overrun", "decode overran its timing model")
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if rate <= 2.0 else run(30, 70, late))
    result = bench.run()
    assert result.rate == 2.0
    assert result.limit == "this machine, not the objectives: decode overran its timing model"


def test_a_machine_that_is_too_slow_for_any_rate_is_no_goodput_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Reason("late", "the load generator was late")
    with pytest.raises(VoidRun, match=r"push at 0.25 requests/s: the load generator was late"):
        Bench(monkeypatch, lambda rate, times: run(100, 0, late)).run()


def test_objectives_that_nothing_can_meet_end_the_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the floor it would take hours: here requests ran alone, and none was good."""
    bench = Bench(monkeypatch, lambda rate, times: run(0, 100, e2e_ms=300.0))
    result = bench.run()
    assert (bench.asked, result.rate) == ([1.0], None)
    assert result.limit.startswith("even 1 requests/s do not hold: none was within, though most ran alone")
    assert "push           0" in table([result])


def test_a_queue_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if rate <= 0.5 else run(0, 100))
    assert bench.run().rate is not None
    assert bench.asked[:2] == [1.0, 0.5]


def test_long_runs_are_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(monkeypatch, lambda rate, times: run(100, 0) if rate <= 1.0 else run(0, 100))
    bench.run()
    assert bench.said[0] == "  1 requests/s: about 2 min"
