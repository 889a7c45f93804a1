"""One engine and a pair behind a render tier answer alike: vLLM's own frontend in front of transport-real engines. And
they still do when the render worker that has the answer in the making is killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
import pytest
from contract_case import CHAT, COMPLETIONS, RESPONSES, Case, chat, text
from contract_cases import CASES
from contract_check import Reply, check_rendered, resolved, seen, send
from sim_tier import simulated

from kvferry.launch.deployment import Deployment

MINE = [case for case in CASES if "sim" in case.tiers]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm not installed: run `make setup`"),
]


@dataclass(frozen=True)
class Sides:
    one: str
    pair: str
    model: str
    deployment: Deployment

    def workers(self) -> dict[int, psutil.Process]:
        """Port -> process that listens there, of the tier's own."""
        assert self.deployment.render is not None
        found = psutil.Process(self.deployment.render.pid).children(recursive=True)
        return {
            one.laddr.port: process
            for process in found
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("render")
    with (
        simulated(folder / "one", "colocated", router=False, vllm_args=("--tokenizer=smollm2",)) as one,
        simulated(folder / "pair", "push", render=2, render_args=("--enable-prompt-tokens-details",)) as pair,
    ):
        yield Sides(one.engines[0].url, pair.router_url, pair.model_name(), pair)


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_one_and_pair_with_a_tier_answer_alike(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    """C01, C03 to C08, C71: as the case says, rendered and parsed by the tier."""
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    for _ in range(case.times):
        one = await send(session, sides.one, asked, sides.model)
        check_rendered(case, one, await send(session, sides.pair, asked, sides.model))


LONG_ANSWER = {"max_tokens": 3000, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
KILLED = (
    Case(name="chat", route=CHAT, body=chat("killed", **LONG_ANSWER)),
    Case(name="completion", route=COMPLETIONS, body=text("killed", logprobs=1, **LONG_ANSWER)),
    Case(
        name="response",
        route=RESPONSES,
        body={"input": "killed", "max_output_tokens": 3000, "ignore_eos": True, "stream": True},
    ),
)


async def health(session: aiohttp.ClientSession, sides: Sides) -> dict[str, Any]:
    async with session.get(sides.pair + "/health") as response:
        facts: dict[str, Any] = await response.json()
        return facts


async def until_both(session: aiohttp.ClientSession, sides: Sides) -> None:
    """The tier's parent has replaced what was killed, and the router has found it."""
    async with asyncio.timeout(120):
        while sum(one["ready"] for one in (await health(session, sides))["render"]) < 2:
            await asyncio.sleep(0.2)


async def moved(session: aiohttp.ClientSession, sides: Sides) -> float:
    async with session.get(sides.pair + "/metrics") as response:
        page = await response.text()
    found = re.search(r'^kvferry_router_render_resumes_total\{how="moved"\} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def interrupted(session: aiohttp.ClientSession, sides: Sides, case: Case, *, all_of_them: bool) -> Reply:
    """The worker that has the session is killed once the client has seen an event of the answer."""
    await until_both(session, sides)
    raw, headers = case.payload(sides.model)
    async with session.post(sides.pair + case.route, data=raw, headers=headers) as response:
        body = await response.content.readany()
        busy = [one["url"] for one in (await health(session, sides))["render"] if one["sessions"]]
        ports = [int(url.rpartition(":")[2]) for url in busy]
        workers = sides.workers()
        for process in workers.values() if all_of_them else [workers[port] for port in ports]:
            process.kill()
        assert len(ports) == 1
        body += await response.content.read()
        return Reply(response.status, response.headers.copy(), body)


@pytest.mark.parametrize("case", KILLED, ids=lambda case: case.name)
async def test_a_killed_worker_is_followed_by_another(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    """Text, scores, ids, counts and events are those of a run that nobody disturbed."""
    before = await moved(session, sides)
    reply = await interrupted(session, sides, case, all_of_them=False)
    assert await moved(session, sides) == before + 1, "it was in the middle"
    assert seen(reply) == seen(await send(session, sides.one, case, sides.model))
    ids = set(re.findall(rb'"id":"((?:chatcmpl|cmpl|resp)[^"]*)"', reply.raw))
    assert len(ids) == 1 and len(set(re.findall(rb'"created(?:_at)?":(\d+)', reply.raw))) == 1


async def test_without_a_worker_a_stream_ends_in_one_typed_event(sides: Sides, session: aiohttp.ClientSession) -> None:
    reply = await interrupted(session, sides, KILLED[0], all_of_them=True)
    *events, last, end = reply.raw.decode().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], end) == ("render_unavailable", "") and len(events) > 1
    whole = await send(session, sides.one, KILLED[0], sides.model)
    said = "".join(json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events)
    assert said and seen(whole)["body"]["choices"][0]["choice"]["delta"]["content"].startswith(said)
    await until_both(session, sides)
