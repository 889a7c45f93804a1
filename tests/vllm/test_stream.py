"""Mode `stream` on real engines: chunks leave early, and neither preemption nor aborts can mix or keep anything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_tier import Legs, asking, at_baseline, deployed, landing_params, source_params

from kvferry.ids import TransferId, new_transfer_id
from kvferry.launch.deployment import Deployment
from kvferry.story import read_story

BLOCK = 32
TOKENS = 16
CHUNK = 512
ENGINE = ("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK), "--no-enable-prefix-caching")
SMALL = ("--num-gpu-blocks-override", "136", "--max-model-len", "4096", "--no-scheduler-reserve-full-isl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """P's pool holds one long prompt and the beginning of another."""
    audit = {"audit": True, "verify_kv": "full"}
    how: dict[str, Any] = {"mode": "stream", "dtype": "float32", "extra_config": audit, "prefill_args": SMALL}
    with deployed(tmp_path_factory.mktemp("stream"), vllm_args=ENGINE, **how) as deployment:
        yield deployment


@pytest.fixture
async def legs(pair: Deployment) -> AsyncIterator[Legs]:
    async with asking() as session:
        legs = Legs(session, pair)
        yield legs
        await at_baseline(legs, legs.prefill, 10.0)
        await at_baseline(legs, legs.decode, 10.0)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 48_000) for _ in range(length)]


def story(pair: Deployment, transfer_id: TransferId) -> list[dict[str, Any]]:
    return list(read_story(Path(pair.spec.state_dir) / "story", transfer_id))


def check_bytes(lines: list[dict[str, Any]], length: int) -> None:
    digests = {line["side"]: line["digests"] for line in lines if line["event"] == "audit"}
    assert len(digests["decode"]) == -(-(length - 1) // BLOCK)
    assert digests["decode"] == digests["prefill"][: len(digests["decode"])]


async def test_most_has_left_when_prefill_is_done(legs: Legs, pair: Deployment) -> None:
    prompt = prompt_of(2000, 1)
    solo = await legs.ask(legs.decode, prompt, TOKENS)
    transfer_id, first, second = await legs.transfer("stream", prompt, TOKENS)
    assert (first.status, second.status) == (200, 200), (first.body, second.body)
    assert second.token_ids == solo.token_ids
    lines = story(pair, transfer_id)
    check_bytes(lines, len(prompt))
    computed = next(line["t"] for line in lines if line["event"] == "computed")
    posts = [line for line in lines if line["event"] == "posted"]
    early = sum(post["nbytes"] for post in posts if post["t"] < computed)
    assert len(posts) >= 4 and early >= 0.7 * sum(post["nbytes"] for post in posts)


async def test_a_prompt_preempted_in_its_middle_is_written_anew(legs: Legs, pair: Deployment) -> None:
    held, streamed = prompt_of(3000, 2), prompt_of(3000, 3)
    solos = [await legs.ask(legs.decode, prompt, TOKENS) for prompt in (held, streamed)]
    first_id, second_id = new_transfer_id(), new_transfer_id()
    first = await legs.ask(legs.prefill, held, 1, source_params(first_id, "stream"))  # keeps its blocks: no taker yet
    assert first.status == 200
    params = landing_params(second_id, "stream", legs.prefill)
    second_d = asyncio.create_task(legs.ask(legs.decode, streamed, TOKENS, params))
    second_p = asyncio.create_task(legs.ask(legs.prefill, streamed, 1, source_params(second_id, "stream")))
    async with asyncio.timeout(60):
        while "rewound" not in [line["event"] for line in story(pair, second_id)]:
            await asyncio.sleep(0.05)
    first_d = await legs.ask(legs.decode, held, TOKENS, landing_params(first_id, "stream", legs.prefill))
    replies = [first_d, await second_d]
    assert (await second_p).status == 200
    assert [reply.token_ids for reply in replies] == [solo.token_ids for solo in solos]
    for transfer_id in (first_id, second_id):
        check_bytes(story(pair, transfer_id), 3000)
    events = [line["event"] for line in story(pair, second_id)]
    assert "rewound" in events and events.index("posted") < events.index("rewound"), "nothing had left before"


async def test_aborts_at_random_times_leave_nothing(legs: Legs, pair: Deployment) -> None:
    rng = random.Random(7)
    prompt = prompt_of(1500, 4)
    solo = await legs.ask(legs.decode, prompt, TOKENS)

    async def one(leaver: str, after_s: float) -> str:
        transfer_id = new_transfer_id()
        tasks = {
            "prefill": asyncio.create_task(legs.ask(legs.prefill, prompt, 1, source_params(transfer_id, "stream"))),
            "decode": asyncio.create_task(
                legs.ask(legs.decode, prompt, TOKENS, landing_params(transfer_id, "stream", legs.prefill))
            ),
        }
        await asyncio.sleep(after_s)
        tasks[leaver].cancel()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        reply = ended[1]
        if isinstance(reply, BaseException):
            return "left"
        assert reply.status in (200, 500)
        if reply.status == 200:
            assert reply.token_ids == solo.token_ids, "an answer from KV that was given up"
        return str(reply.status)

    outcomes = [await one(rng.choice(["prefill", "decode"]), rng.uniform(0.0, 2.0)) for _ in range(14)]
    assert {"left", "500"} <= set(outcomes), outcomes
    _, first, second = await legs.transfer("stream", prompt, TOKENS)
    assert (first.status, second.status) == (200, 200) and second.token_ids == solo.token_ids
