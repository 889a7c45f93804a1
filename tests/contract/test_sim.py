"""One engine and a pair of transport-real engines answer alike: every case of the table, in every mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
import pytest
from contract_cases import CASES, Case, text
from contract_check import check, resolved, seen, send
from sim_tier import simulated

from kvferry.launch.deployment import Deployment

MINE = [case for case in CASES if "sim" in case.tiers]
BASELINE_S = 5.0


@dataclass(frozen=True)
class Sides:
    one: str
    pair: str
    model: str
    deployments: tuple[Deployment, ...]


@pytest.fixture(scope="module", params=["push", "pull", "stream"])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp(request.param)
    with (
        simulated(folder / "one", "colocated", router=False) as one,
        simulated(folder / "pair", request.param) as pair,
    ):
        yield Sides(one.engines[0].url, pair.router_url, pair.model_name(), (one, pair))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, max_field_size=1 << 20) as session:
        yield session


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_one_and_pair_answer_alike(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    """C01, C03 to C08, C20, C44, C62: as the case says."""
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    for _ in range(case.times):
        one = await send(session, sides.one, asked, sides.model)
        check(case, one, await send(session, sides.pair, asked, sides.model))
    await at_baseline(session, sides)


async def at_baseline(session: aiohttp.ClientSession, sides: Sides) -> None:
    """No request runs and no block is held, on any engine."""
    async with asyncio.timeout(BASELINE_S):
        for engine in (engine for deployment in sides.deployments for engine in deployment.engines):
            while True:
                async with session.get(f"{engine.url}/metrics") as response:
                    lines = (await response.text()).splitlines()
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvferry:open_")
                left = [line for line in lines if line.startswith(names) and float(line.split()[-1])]
                if not left:
                    break
                # the gauges move when the engine steps: a tiny request makes it
                tiny = Case(name="tiny", body={"prompt": [1], "max_tokens": 1})
                await send(session, engine.url, tiny, sides.model)


async def test_headers_of_one_engine_are_the_pairs_too(sides: Sides, session: aiohttp.ClientSession) -> None:
    case = Case(name="headers", body=text("headers of both"), headers={"X-Request-Id": "mine"})
    one = await send(session, sides.one, case, sides.model)
    pair = await send(session, sides.pair, case, sides.model)
    ours, theirs = ({name.lower() for name in reply.headers} for reply in (pair, one))
    assert ours - theirs == {"x-kvferry-transfer-id", "x-request-id"} and theirs <= ours
    assert pair.headers["X-Request-Id"] == "mine"
    assert json.loads(pair.raw)["id"] == json.loads(one.raw)["id"] == "cmpl-mine"


async def test_c34_one_client_id_twice_at_once(sides: Sides, session: aiohttp.ClientSession) -> None:
    """C34."""
    cases = [
        Case(name=name, body=text(name, stream=stream), headers={"X-Request-Id": "dup"})
        for name, stream in (("first of two", False), ("second of two", True), ("third of three", False))
    ]
    alone = [seen(await send(session, sides.one, case, sides.model)) for case in cases]
    at_once = await asyncio.gather(*(send(session, sides.pair, case, sides.model) for case in cases))
    assert [seen(reply) for reply in at_once] == alone
    assert len({reply.headers["x-kvferry-transfer-id"] for reply in at_once}) == 3


async def test_a_follow_up_has_less_cached(sides: Sides, session: aiohttp.ClientSession) -> None:
    """A documented difference: P never had the KV of the answer. The texts are equal."""
    first = Case(name="turn", body=text("turn one", max_tokens=200, ignore_eos=True, return_token_ids=True))
    reply = json.loads((await send(session, sides.one, first, sides.model)).raw)["choices"][0]
    await send(session, sides.pair, first, sides.model)
    prompt = [*reply["prompt_token_ids"], *reply["token_ids"], *range(500, 520)]
    second = Case(name="turn two", body=text("", prompt=prompt))
    one, pair = [json.loads((await send(session, url, second, sides.model)).raw) for url in (sides.one, sides.pair)]
    assert pair["choices"] == one["choices"]
    cached = [side["usage"]["prompt_tokens_details"]["cached_tokens"] for side in (one, pair)]
    assert cached[1] <= len(reply["prompt_token_ids"]) < cached[0]


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(MINE) >= 120 and len([case for case in CASES if "vllm" in case.tiers]) >= 25
