"""Sessions, loads, what prefill and transfer cost, when to disaggregate, the gate of the TTFT objective, surveys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.router.choice.admission import RELAX, Gate, Overloaded, fits
from kvferry.router.choice.cost import LEAST, Costs, Estimate, Line
from kvferry.router.choice.disaggregate import EXPLORE, border, decide, parse_setting
from kvferry.router.choice.load import Load, Share
from kvferry.router.choice.sessions import MOST_LENGTH, Sessions, session_of
from kvferry.router.config import Action, RouterConfig
from kvferry.router.engines.breaker import BreakerSettings
from kvferry.router.engines.survey import Build, read
from kvferry.router.spec import parse_spec

# -- sessions


def test_where_a_sessions_name_is_looked_for() -> None:
    body = {"session_params": {"session_id": "a"}, "session_id": "b", "user_id": "c", "user": "d"}
    assert session_of({"X-Session-ID": "h"}, body) == "h"
    found = []
    for field in list(body):
        found.append(session_of({}, body))
        del body[field]
    assert found == ["a", "b", "c", "d"] and session_of({}, body) == ""
    assert session_of({}, {"session_params": "x", "session_id": 7, "user": "y" * (MOST_LENGTH + 1)}) == ""


def test_sessions_by_role_until_they_end() -> None:
    now = [0.0]
    sessions = Sessions(10.0, most=2, clock=lambda: now[0])
    sessions.keep("s", "prefill", "p1")
    now[0] = 6.0
    sessions.keep("s", "decode", "d1")
    now[0] = 12.0
    assert (sessions.last("s", "prefill"), sessions.last("s", "decode")) == ("p1", "d1"), (
        "each use starts the time anew"
    )
    now[0] = 16.0
    assert sessions.last("s", "decode") == "" and not sessions.finish("s")
    for name in ("a", "b", "c"):
        sessions.keep(name, "decode", name)
    assert len(sessions) == 2 and sessions.last("a", "decode") == ""
    assert sessions.finish("b") and not sessions.finish("b") and sessions.last("b", "decode") == ""
    sessions.keep("", "decode", "x")
    assert len(sessions) == 1


# -- load


def test_a_share_leaves_once() -> None:
    load, freed = Load(), []
    share = Share(load, prefill=100, held=7, freed=lambda: freed.append(load.prefill))
    other = Share(load, prefill=5)
    assert (load.prefill, load.held, load.requests) == (105, 7, 2)
    share.grow(3)
    share.prefilled()
    share.prefilled()
    assert (load.prefill, load.held, freed) == (5, 10, [5])
    share.release()
    share.release()
    share.grow(9)
    assert (load.prefill, load.held, load.requests) == (5, 0, 1)
    other.release()
    other.prefilled()
    assert (load.prefill, load.held, load.requests) == (0, 0, 0)


# -- cost


def line(points: list[tuple[float, float]]) -> Line:
    found = Line()
    for x, y in points:
        found.add(x, y)
    return found


def test_a_line_finds_start_and_slope() -> None:
    assert line([(1, 1)] * (LEAST - 1)).fit() is None and line([]).at(3) is None
    a, b = line([(x, 0.05 + 0.001 * x) for x in (100, 900, 200, 500, 700, 50)]).fit() or (0, 0)
    assert a == pytest.approx(0.05) and b == pytest.approx(0.001)
    assert line([(500, 0.5)] * 9).fit() == pytest.approx((0.0, 0.001))
    assert line([(0, 0.25)] * 9).fit() == pytest.approx((0.25, 0.0))
    assert line([(x, 1000 - x) for x in range(10)]).fit() == pytest.approx((995.5, 0.0), rel=0.01), "no negative slope"
    a, b = line([(x, 0.01 * x - 1) for x in (110, 120, 130, 140, 150)]).fit() or (1, 0)
    assert a == 0.0 and 0 < b < 0.01


def test_a_line_follows_what_is_new() -> None:
    found = line([(x % 7 * 100, 0.001 * (x % 7 * 100)) for x in range(300)])
    for x in range(300):
        found.add(x % 7 * 100, 0.004 * (x % 7 * 100))
    assert (found.fit() or (0, 0))[1] == pytest.approx(0.004, rel=0.01)


def costs(per_token: float = 0.001, start: float = 0.02, overhead: float = 0.1, moved: float = 0.0001) -> Costs:
    found = Costs()
    for tokens in (100, 300, 500, 700, 900):
        found.prefill.add(tokens, start + per_token * tokens)
        found.overhead.add(tokens, overhead + moved * tokens)
    return found


def test_ttft_is_what_waits_and_what_moves() -> None:
    assert Costs().ttft_s(0, 100, 100) is None
    assert costs().ttft_s(1000, 200, 400) == pytest.approx(0.02 + 1.2 + 0.1 + 0.04)
    assert costs().ttft_s(0, 200, 0) == pytest.approx(0.02 + 0.2 + 0.1)


def test_tokens_of_text_as_the_engines_count_them() -> None:
    found = Costs()
    assert found.tokens_of(400) == 100
    for _ in range(50):
        found.told(600, 200)
    assert found.tokens_of(600) == 200
    found.told(0, 5)
    assert found.tokens_of(600) == 200


# -- when to disaggregate


@pytest.mark.parametrize("text", ["", "never", "-1", "0", "1.5"])
def test_no_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="always, auto"):
        parse_setting(text)


def test_settings() -> None:
    assert [parse_setting(text) for text in ("always", "auto", "200")] == ["always", "auto", 200]
    assert decide("always", 0, costs(), 0, 0) == "prefill-decode"
    assert [decide(200, uncached, Costs(), 9, 0) for uncached in (199, 200)] == ["decode-only", "prefill-decode"]


def test_the_border_follows_from_what_was_measured() -> None:
    assert border(Costs(), 0) is None and decide("auto", 1, Costs(), 0, 0) == "prefill-decode"
    assert border(costs(), 0) == pytest.approx(0.1 / 0.0009)
    assert border(costs(), 9) == pytest.approx(0.1 / 0.0099), "a busy D takes short ones only"
    assert border(costs(moved=0.002), 0) == float("inf"), "a transfer that is slower than computing"
    assert border(costs(moved=0.002), 3) == pytest.approx(0.1 / 0.002)
    for uncached, told in ((100, "decode-only"), (120, "prefill-decode")):
        assert decide("auto", uncached, costs(), 0, 0) == told


def test_auto_keeps_looking_what_a_transfer_costs() -> None:
    told = [decide("auto", 10, costs(), 0, turn) for turn in range(2 * EXPLORE)]
    assert told.count("prefill-decode") == 2


# -- the TTFT objective


def test_fits() -> None:
    assert fits(Estimate(10**9, None), 0.1, True), "nothing was measured"
    assert fits(Estimate(0, 99.0), 0.1, True), "an idle engine takes any"
    assert fits(Estimate(1, 0.1), 0.1, False) and not fits(Estimate(1, 0.11), 0.1, False)
    assert not fits(Estimate(1, 0.09), 0.1, True) and fits(Estimate(1, 0.1 * RELAX), 0.1, True)


class Busy:
    """One engine, a second per 1,000 tokens, on which requests of so many tokens wait."""

    def __init__(self, action: Action, slo_s: float = 1.0, most: int = 8, limit_s: float = 30.0) -> None:
        self.gate = Gate(slo_s, action, most, limit_s)
        self.waiting = 0
        self.order: list[str] = []

    def estimate(self, tokens: int) -> Callable[[], Estimate]:
        return lambda: Estimate(self.waiting, (self.waiting + tokens) / 1000)

    async def ask(self, client: str, tokens: int) -> str:
        verdict = await self.gate.admit(client, self.estimate(tokens))
        self.waiting += tokens
        self.order.append(client)
        return verdict

    def done(self, tokens: int) -> None:
        self.waiting -= tokens
        self.gate.freed()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_shed_says_why_and_when_to_come_back() -> None:
    busy = Busy("shed")
    assert await busy.ask("a", 5000) == "admitted", "an idle engine takes any"
    with pytest.raises(Overloaded, match="5100 ms, the objective is 1000 ms") as caught:
        await busy.ask("b", 100)
    assert (caught.value.http_status, caught.value.code, caught.value.retry_after_s) == (429, "ttft_slo", 5)


async def test_the_gate_does_not_flap() -> None:
    busy = Busy("shed")
    busy.waiting = 950
    with pytest.raises(Overloaded):
        await busy.ask("a", 100)
    busy.waiting = 850
    with pytest.raises(Overloaded):
        await busy.ask("a", 100)
    busy.waiting = 700
    assert await busy.ask("a", 100) == "admitted"
    busy.waiting = 850
    assert await busy.ask("a", 100) == "admitted", "open again, up to the objective itself"


async def test_colocate() -> None:
    busy = Busy("colocate")
    assert await busy.ask("a", 900) == "admitted"
    assert await busy.gate.admit("b", busy.estimate(200)) == "colocated"


async def test_the_queue_takes_clients_in_turn_and_none_overtakes() -> None:
    busy = Busy("queue")
    assert await busy.ask("first", 1000) == "admitted"
    waiting = [asyncio.create_task(busy.ask(client, 300)) for client in ("a", "a", "a", "b", "c")]
    await settled()
    late = asyncio.create_task(busy.ask("d", 1))
    await settled()
    assert busy.gate.waiting == 6 and busy.order == ["first"]
    busy.done(1000)
    await settled()
    assert busy.order == ["first", "a", "b"], "two fit below 0.8 s"
    busy.done(600)
    await settled()
    assert busy.order == ["first", "a", "b", "c", "d", "a"]
    busy.done(601)
    assert {await task for task in (*waiting, late)} == {"queued"}
    assert busy.order[-1] == "a" and busy.gate.waiting == 0 and busy.waiting == 300


async def test_one_that_leaves_the_queue_holds_nobody_up() -> None:
    busy = Busy("queue")
    await busy.ask("first", 1000)
    gone, stays = (asyncio.create_task(busy.ask(client, 100)) for client in ("a", "b"))
    await settled()
    busy.waiting = 0
    gone.cancel()
    assert await stays == "queued" and busy.gate.waiting == 0 and busy.order == ["first", "b"]


async def test_the_queue_is_bounded_in_number_and_time() -> None:
    busy = Busy("queue", most=1, limit_s=0.01)
    await busy.ask("first", 1000)
    waits = asyncio.create_task(busy.ask("a", 100))
    await settled()
    with pytest.raises(Overloaded, match="1 requests wait already"):
        await busy.ask("b", 100)
    with pytest.raises(Overloaded, match=r"has waited 0\.01 s"):
        await waits
    assert busy.gate.waiting == 0


# -- settings, surveys


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ttft_slo_ms": -1.0}, "--ttft-slo: -1"),
        ({"slo_queue": -2}, "--slo-queue: -2"),
        ({"prefix_tokens": -3}, "--prefix-tokens: -3"),
        ({"ttft_slo_ms": float("nan")}, "--ttft-slo: nan"),
        ({"port": 70000}, "--port: 70000 is not a port"),
        ({"admin_port": -1}, "--admin-port: -1 is not a port"),
        ({"request_timeout_s": -1.0}, "--request-timeout: -1"),
        ({"max_body_bytes": 0}, "--max-body-mib: 0"),
        ({"retries": -1}, "--retries: -1"),
        ({"drain_timeout_s": float("inf")}, "--drain-timeout: inf"),
        ({"breaker": BreakerSettings(failures=-1)}, "--breaker-failures: -1"),
        ({"breaker": BreakerSettings(open_s=0)}, "--breaker-open: 0"),
    ],
)
def test_wrong_settings(more: dict[str, Any], said: str) -> None:
    specs = {"prefill": (parse_spec("http://p:1"),), "decode": (parse_spec("http://d:1"),)}
    with pytest.raises(ConfigError, match=said):
        RouterConfig(**specs, **more).check()


def test_nothing_to_disaggregate() -> None:
    for more, said in (({"disaggregate": "auto"}, "--disaggregate"), ({"ttft_slo_ms": 5.0}, "--ttft-slo")):
        config = RouterConfig(decode=(parse_spec("http://d:1"),), connector="none", **more)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{said} with colocated"):
            config.check()


PAGE = """# HELP vllm:cache_config_info x
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="%s",engine="0",num_gpu_blocks="%s"} 1.0
vllm:num_requests_running{engine="0",model_name="a, \\"b\\""} 0.0
vllm:num_requests_running{engine="1",model_name="a, \\"b\\""} 0.0
"""


def test_what_metrics_tell() -> None:
    assert read(PAGE % ("True", "1000")) == Build(ranks=2, prefix_tokens=16_000, caches=True)
    assert read(PAGE % ("False", "None")) == Build(ranks=2, prefix_tokens=0, caches=False)
    assert read("python_gc_objects_collected_total 1\n") == Build()
