"""One engine and a pair of transport-real engines answer alike: every case of the table, in every mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import pytest
from contract_case import Case, text
from contract_cases import CASES
from contract_check import check, resolved, seen, send
from contract_sides import Sides, at_baseline, both

MINE = [case for case in CASES if "sim" in case.tiers]


@pytest.fixture(scope="module", params=["push", "pull", "stream"])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with both(tmp_path_factory.mktemp(request.param), request.param) as sides:
        yield sides


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_one_and_pair_answer_alike(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    """C01, C03 to C08, C20, C44, C62: as the case says."""
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    for _ in range(case.times):
        one = await send(session, sides.one, asked, sides.model)
        check(case, one, await send(session, sides.pair, asked, sides.model))
    await at_baseline(session, sides)


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
