"""With `--first-token prefill` a pair behind a render tier answers like one engine: text of both engines' tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import aiohttp
import pytest
from contract_case import GENERATE, Case
from contract_cases import CASES
from contract_check import check_rendered, resolved, send
from sim_tier import simulated

MINE = [case for case in CASES if "sim" in case.tiers and case.route != GENERATE]
FIRST = 'kvferry_router_first_tokens_total{by="prefill"} '
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm not installed: run `make setup`"),
]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """URL of one engine, of the pair's router, and the model."""
    folder = tmp_path_factory.mktemp("first")
    more = {"render": 1, "render_args": ("--enable-prompt-tokens-details",)}
    with (
        simulated(folder / "one", "colocated", router=False, vllm_args=("--tokenizer=smollm2",)) as one,
        simulated(folder / "pair", "pull", router_args=("--first-token", "prefill"), **more) as pair,
    ):
        yield one.engines[0].url, pair.router_url, pair.model_name()


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_alike(case: Case, sides: tuple[str, str, str], session: aiohttp.ClientSession) -> None:
    one, pair, model = sides
    asked = await resolved(session, one, pair, case, model)
    for _ in range(case.times):
        check_rendered(case, await send(session, one, asked, model), await send(session, pair, asked, model))


async def test_it_was_prefills_token(sides: tuple[str, str, str], session: aiohttp.ClientSession) -> None:
    async with session.get(f"{sides[1]}/metrics") as reply:
        told = (await reply.text()).splitlines()
    assert float(next(line for line in told if line.startswith(FIRST)).removeprefix(FIRST)) > 20
