from __future__ import annotations

import pytest

from kvferry.bench.goodput import Objectives, Workload
from kvferry.bench.records import Sample
from kvferry.bench.search import Found, highest


class Server:
    """Holds up to `limit`; remembers what it was asked."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.asked: list[float] = []

    def __call__(self, rate: float) -> bool:
        self.asked.append(rate)
        return rate <= self.limit


@pytest.mark.parametrize("limit", [0.07, 0.9, 1.0, 1.01, 3.7, 8.0, 99.0])
def test_the_limit_is_found_to_five_percent(limit: float) -> None:
    server = Server(limit)
    found = highest(server, 1.0, floor=0.05, ceiling=256.0)
    assert found.rate is not None and found.broken is not None
    assert found.rate <= limit < found.broken <= found.rate * 1.05
    assert len(set(server.asked)) == len(server.asked)


def test_it_doubles_first() -> None:
    server = Server(5.0)
    highest(server, 1.0, floor=0.05, ceiling=256.0)
    assert server.asked[:4] == [1.0, 2.0, 4.0, 8.0]


def test_nothing_holds() -> None:
    server = Server(0.01)
    assert highest(server, 1.0, floor=0.2, ceiling=9.0) == Found(None, 0.2)
    assert server.asked == [1.0, 0.5, 0.25, 0.2]


def test_everything_holds() -> None:
    server = Server(1e9)
    assert highest(server, 1.0, floor=0.2, ceiling=6.0) == Found(6.0, None)
    assert server.asked == [1.0, 2.0, 4.0, 6.0]


def test_what_no_lower_rate_can_mend_ends_it() -> None:
    asked: list[float] = []

    def hopeless(rate: float) -> bool | None:
        asked.append(rate)
        return None

    assert highest(hopeless, 1.0, floor=0.05, ceiling=9.0) == Found(None, 1.0)
    assert asked == [1.0]


def test_no_hope_above_a_rate_that_holds_is_a_plain_no() -> None:
    found = highest(lambda rate: True if rate <= 3.0 else None, 1.0, floor=0.05, ceiling=9.0)
    assert found.rate is not None and found.broken is not None
    assert found.rate <= 3.0 < found.broken <= found.rate * 1.05


def test_enough_requests_for_one_percent_and_for_the_time() -> None:
    work = Workload(10, 10, seconds=10.0)
    assert work.num(100, 2.0) == 100
    assert work.num(100, 50.0) == 500


@pytest.mark.parametrize(
    ("ttft", "gaps", "error", "met"),
    [
        (200.0, [20.0, 20.0], "", True),
        (200.1, [20.0, 20.0], "", False),
        (200.0, [20.0, 20.2], "", False),
        (200.0, [0.0, 40.0], "", True),  # its mean counts, not its worst gap
        (100.0, [10.0, 10.0], "500: no", False),
    ],
)
def test_a_request_holds_both_or_it_does_not(ttft: float, gaps: list[float], error: str, met: bool) -> None:
    sample = Sample(0, 5, ttft_ms=ttft, itl_ms=gaps, first_tokens=1, tokens=1 + len(gaps), error=error)
    assert Objectives(200.0, 20.0).met(sample) is met


def test_no_token_holds_nothing() -> None:
    assert not Objectives(200.0, 20.0).met(Sample(0, 5))
