"""The router's small machines under any sequence of events and times: windows, breaker, outliers, retry budget."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.router.engines.breaker import Breaker, BreakerSettings, State
from kvferry.router.engines.budget import RetryBudget, RetrySettings, backoff_s
from kvferry.router.engines.outliers import Outliers, OutlierSettings, Sample
from kvferry.router.engines.window import Window

steps = st.floats(0, 4, allow_nan=False)


@given(st.lists(st.tuples(steps, st.integers(0, 5))), st.integers(1, 12))
def test_a_window_forgets_no_sooner_and_at_most_a_slot_later(events: list[tuple[float, int]], slots: int) -> None:
    window, now, said = Window(10.0, 1, slots), 0.0, []
    for step, amount in events:
        now += step
        window.add(now, float(amount))
        said.append((now, amount))
        (total,) = window.sums(now)
        slot = 10.0 / slots
        assert total >= sum(n for at, n in said if at > now - 10.0 + slot)
        assert total <= sum(n for at, n in said if at > now - 10.0 - slot)


class Traffic:
    """Requests through one breaker, and what the rules say of them."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.breaker = Breaker(settings)
        self.now = 0.0
        self.flying: list = []
        self.opened_at: float | None = None

    def step(self, seconds: float, what: str, pick: int) -> None:
        self.now += seconds
        before = self.breaker.state(self.now)
        if what == "send":
            if self.breaker.allows(self.now):
                self.flying.append(self.breaker.take(self.now))
                assert before is not State.OPEN
        elif what == "renewed":
            self.breaker.renewed()
            assert self.breaker.state(self.now) is not State.OPEN
        elif self.flying:
            ticket = self.flying.pop(pick % len(self.flying))
            stale = not self.breaker.current(ticket)
            if what == "worked":
                self.breaker.worked(ticket, self.now)
            elif what == "failed":
                self.breaker.failed(ticket, self.now)
            else:
                self.breaker.dropped(ticket)
            after = self.breaker.state(self.now)
            assert not stale or after is before, "what was sent in another era counts no more"
            assert after is not State.OPEN or before is State.OPEN or what == "failed"
            if before is State.HALF_OPEN and after is State.CLOSED:
                assert what == "worked" and ticket.probe
        probes = [ticket for ticket in self.flying if ticket.probe and self.breaker.current(ticket)]
        assert len(probes) <= 1, "one at a time tries a half-open circuit"
        if self.breaker.state(self.now) is State.HALF_OPEN:
            assert self.breaker.allows(self.now) == (not probes), "and it can't be stuck without one"


happening = st.sampled_from(["send", "send", "worked", "failed", "failed", "dropped", "renewed"])


@given(st.lists(st.tuples(steps, happening, st.integers(0, 9)), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_breaker(events: list[tuple[float, str, int]], failures: int, successes: int) -> None:
    traffic = Traffic(BreakerSettings(failures=failures, successes=successes, open_s=5.0, volume=6, window_s=20.0))
    for event in events:
        traffic.step(*event)
    traffic.now += 5.0
    assert traffic.breaker.state(traffic.now) is not State.OPEN, "no circuit stays open for longer than it was told"


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_breaker_of_no_failures_never_opens(results: list[bool]) -> None:
    breaker = Breaker(BreakerSettings(failures=0))
    for number, good in enumerate(results):
        ticket = breaker.take(float(number))
        (breaker.worked if good else breaker.failed)(ticket, float(number))
        assert breaker.state(float(number)) is State.CLOSED


def test_breaker_opens_at_five_in_a_row_and_closes_after_two_that_worked() -> None:
    breaker = Breaker(BreakerSettings())
    for _ in range(4):
        breaker.failed(breaker.take(0.0), 0.0)
    breaker.worked(breaker.take(0.0), 0.0)
    for number in range(5):
        assert breaker.state(1.0) is State.CLOSED, number
        breaker.failed(breaker.take(1.0), 1.0)
    assert breaker.state(1.0) is State.OPEN and breaker.open_for(11.0) == 20.0 and not breaker.allows(30.9)
    probe = breaker.take(31.0)
    assert probe.probe and not breaker.allows(31.0)
    breaker.worked(probe, 31.5)
    assert breaker.state(31.5) is State.HALF_OPEN and breaker.allows(31.5)
    breaker.worked(breaker.take(31.5), 32.0)
    assert breaker.state(32.0) is State.CLOSED


def test_breaker_opens_at_an_error_rate_too() -> None:
    breaker = Breaker(BreakerSettings())
    for number in range(20):
        assert breaker.state(0.0) is State.CLOSED
        ticket = breaker.take(0.0)
        (breaker.failed if number % 2 else breaker.worked)(ticket, 0.0)
    assert breaker.state(0.0) is State.OPEN


def test_a_half_open_circuit_opens_at_the_first_failure() -> None:
    breaker = Breaker(BreakerSettings(failures=1, open_s=5.0))
    breaker.failed(breaker.take(0.0), 0.0)
    breaker.failed(breaker.take(5.0), 5.5)
    assert breaker.state(10.4) is State.OPEN and breaker.state(10.5) is State.HALF_OPEN


numbers = st.sampled_from([0.0, 10.0, 19.0, 40.0, 90.0])
samples = st.builds(
    lambda good, bad, mean: Sample(good=good, bad=bad, seconds=mean * good, timed=good), numbers, numbers, numbers
)


@given(st.lists(st.tuples(steps, st.lists(samples, min_size=1, max_size=7)), max_size=10))
def test_never_more_than_half_is_ejected(rounds: list[tuple[float, list[Sample]]]) -> None:
    outliers, now, members = Outliers(OutlierSettings(eject_s=3.0, eject_max_s=9.0)), 0.0, 7
    for step, figures in rounds:
        now += step
        given_ = {f"e{index}": figures[index % len(figures)] for index in range(members)}
        fresh = outliers.judge(now, given_)
        out = [url for url in given_ if outliers.ejected_for(url, now) > 0]
        assert len(out) <= members // 2 and set(fresh) <= set(out)
        assert all(0 < outliers.ejected_for(url, now) <= 9.001 for url in out)
    assert not any(outliers.ejected_for(f"e{index}", now + 9.001) for index in range(members))


def sample(good: float, bad: float = 0.0, mean: float = 0.1) -> Sample:
    return Sample(good=good, bad=bad, seconds=mean * good, timed=good)


def test_what_is_far_and_what_is_not() -> None:
    def ejected(*figures: Sample, **settings: float) -> list[str]:
        named = {str(index): one for index, one in enumerate(figures)}
        return sorted(Outliers(OutlierSettings(**settings)).judge(0.0, named))  # type: ignore[arg-type]

    well = sample(100)
    assert ejected(well, well, sample(60, 40)) == ["2"]
    assert ejected(well, well, sample(80, 20)) == [], "not by far"
    assert ejected(sample(60, 40), sample(60, 40), sample(55, 45)) == [], "all are as bad: nobody is an outlier"
    assert ejected(well, well, sample(100, mean=0.5)) == ["2"]
    assert ejected(sample(100, mean=0.001), sample(100, mean=0.001), sample(100, mean=0.2)) == [], "milliseconds"
    assert ejected(well, sample(100, mean=0.5)) == ["1"], "of two, one may go"
    assert ejected(well, sample(5, 10)) == [], "too few to tell"
    assert ejected(sample(0, 50)) == [], "the only one stays"
    assert ejected(well, well, well, sample(0, 50), sample(40, 60), sample(30, 70)) == ["3", "4", "5"]
    assert ejected(well, well, well, sample(0, 50), sample(40, 60)) == ["3", "4"]
    assert ejected(well, well, sample(0, 50), sample(30, 60), sample(100, mean=9.0)) == ["2", "4"], "the worst first"
    assert Outliers(OutlierSettings(enabled=False)).judge(0.0, {"a": well, "b": sample(0, 50)}) == {}


def test_each_ejection_in_a_row_is_longer() -> None:
    outliers, now, waits = Outliers(OutlierSettings()), 0.0, []
    for _ in range(12):
        assert outliers.judge(now, {"a": sample(100), "b": sample(0, 50)})
        waits.append(outliers.ejected_for("b", now))
        now += waits[-1]
    assert waits[:3] == [30.0, 60.0, 90.0] and waits[-1] == 300.0
    outliers.judge(now + 1000 * 30.0, {"a": sample(100), "b": sample(0, 50)})
    assert outliers.ejected_for("b", now + 1000 * 30.0) == 30.0, "a long time without trouble is forgotten trouble"


@given(st.lists(st.tuples(steps, st.booleans()), max_size=80), st.integers(0, 5))
@example([(0.0, False)] * 4 + [(3.0, True), (4.0, True), (4.0, False)], 0)
def test_retries_are_a_share_of_requests_and_a_floor(events: list[tuple[float, bool]], floor: int) -> None:
    settings = RetrySettings(ratio=0.2, floor=floor, window_s=10.0)
    budget, now, told = RetryBudget(settings), 0.0, defaultdict(list)
    for step, wants in events:
        now += step
        told["requests"].append(now)
        budget.request(now)
        if wants and budget.take(now):  # a share of the requests of that moment: they may be forgotten before it is
            told["retries"].append(now)
            recent = sum(at > now - 9.0 for at in told["retries"])
            at_most = sum(at > now - 11.0 for at in told["requests"])
            assert recent <= floor + 0.2 * at_most + 1


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_backoff_has_full_jitter_and_a_limit(tries: int, drawn: float) -> None:
    settings = RetrySettings()
    wait = backoff_s(settings, tries, lambda: drawn)
    assert 0 <= wait <= min(settings.backoff_max_s, settings.backoff_s * 2 ** min(tries - 1, 30))
    assert backoff_s(settings, tries, lambda: 0.0) == 0.0
