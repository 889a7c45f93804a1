"""With `--first-token prefill` a pair still answers like one engine, and says whose token was the first."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from contract_case import COMPLETIONS, GENERATE, Case, ids, text, tokens
from contract_cases import CASES
from contract_check import check, resolved, send
from contract_sides import Sides, at_baseline, both

MINE = [case for case in CASES if "sim" in case.tiers and case.route == GENERATE]
MODES = {"pull": (), "stream": ("--bind", "late")}
MADE = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=MODES)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    more = ("--first-token", "prefill", *MODES[request.param])
    with both(tmp_path_factory.mktemp(request.param), request.param, router_args=more) as sides:
        yield sides


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


async def counted(session: aiohttp.ClientSession, sides: Sides) -> dict[str, int]:
    async with session.get(f"{sides.pair}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "kvferry_router_first_tokens_total"
    return {
        by: int(float(line.split()[-1]))
        for line in lines
        for by in ("prefill", "decode")
        if f'{name}{{by="{by}"}}' in line
    }


async def by(session: aiohttp.ClientSession, sides: Sides, case: Case) -> str:
    """Who made the first token of that answer, which is one engine's."""
    before = await counted(session, sides)
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    if asked is not case:
        before = await counted(session, sides)
    check(case, await send(session, sides.one, asked, sides.model), await send(session, sides.pair, asked, sides.model))
    after = await counted(session, sides)
    return ",".join(who for who, count in after.items() if count != before[who])


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_one_and_pair_answer_alike(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    one = await send(session, sides.one, asked, sides.model)
    check(case, one, await send(session, sides.pair, asked, sides.model))
    await at_baseline(session, sides)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_it_is_prefills(stream: bool, sides: Sides, session: aiohttp.ClientSession) -> None:
    for at, more in enumerate(({}, {"logprobs": 1}, {"min_tokens": 1}, {"seed": 3}, {"max_tokens": 1})):
        case = tokens("prefill's", 70 + 10 * at + stream, MADE | more, stream=stream)
        assert await by(session, sides, case) == "prefill", more


async def test_an_end_at_once_asks_no_decode_engine(sides: Sides, session: aiohttp.ClientSession) -> None:
    async def legs() -> str:
        async with session.get(f"{sides.pair}/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(line for line in lines if line.startswith("kvferry_router_pd_decode_requests_total"))

    for at, stream in enumerate((False, True)):
        case = tokens("ended", 130 + at, MADE | {"stop_token_ids": ["<token 0>"]}, stream=stream)
        asked = await resolved(session, sides.one, sides.pair, case, sides.model)
        before = await legs()
        assert await by(session, sides, asked) == "prefill"
        assert await legs() == before
    await at_baseline(session, sides)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 0.8, "seed": 7},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"stop": ["zzz"]},
        {"max_tokens": None},
        {"temperature": 1, "seed": 4},
    ],
    ids=str,
)
async def test_it_stays_decodes(more: dict[str, object], sides: Sides, session: aiohttp.ClientSession) -> None:
    sampling = {name: value for name, value in (MADE | more).items() if value is not None}
    if "max_tokens" not in sampling:
        sampling |= {"ignore_eos": False, "stop_token_ids": list(range(0, 30_000, 5))}
    body: dict[str, object] = {"output_mode": "text"} if "stop" in more else {}
    assert await by(session, sides, tokens("decode's", 150 + len(str(more)), sampling, stream=True, **body)) == "decode"


async def test_of_text_it_is_decodes(sides: Sides, session: aiohttp.ClientSession) -> None:
    case = Case(name="of text", route=COMPLETIONS, body=text("of text, first token", stream=True))
    assert await by(session, sides, case) == "decode"


async def test_at_the_models_length_it_is_decodes(sides: Sides, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{sides.one}/v1/models") as response:
        limit = json.loads(await response.text())["data"][0]["max_model_len"]
    for room, who in ((6, "prefill"), (5, "decode")):
        case = tokens("long", 0, MADE, token_ids=ids(200 + room, limit - room), stream=True)
        assert await by(session, sides, case) == who
