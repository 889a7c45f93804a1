"""A decode engine whose pool is short: who is preempted after its KV came computes it anew, and nobody parks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_tier import Legs, asking, at_baseline, deployed, metric

from kvferry.launch.deployment import Deployment
from kvferry.story import read_story

BLOCK = 32
POOL = 10
"""Blocks of D's that requests can have; vLLM keeps one more for itself."""
ENGINE = ("--block-size", str(BLOCK), "--no-enable-prefix-caching")
SMALL = ("--num-gpu-blocks-override", str(POOL + 1), "--max-model-len", str((POOL - 1) * BLOCK))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    how: dict[str, Any] = {"mode": "push", "dtype": "float32", "decode_args": SMALL}
    how |= {"extra_config": {"verify_kv": "full", "debug_invariants": True}}
    with deployed(tmp_path_factory.mktemp("pools"), vllm_args=ENGINE, **how) as deployment:
        yield deployment


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 48_000) for _ in range(length)]


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [((5 * BLOCK - 10, 5 * BLOCK - 10), 40), ((5 * BLOCK, 5 * BLOCK), 4)],
    ids=["C49: one and a half requests", "C75: each needs one block more"],
)
async def test_who_is_preempted_recomputes_and_both_are_right(
    mode: str, lengths: tuple[int, ...], tokens: int, pair: Deployment
) -> None:
    async with asking() as session:
        legs = Legs(session, pair)
        prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
        solos = [await legs.ask(legs.decode, prompt, tokens) for prompt in prompts]
        before = await metric(legs, legs.decode, "num_preemptions_total")
        async with asyncio.timeout(60):
            done = await asyncio.gather(*(legs.transfer(mode, prompt, tokens) for prompt in prompts))
        for (transfer_id, first, second), solo in zip(done, solos, strict=True):
            assert (first.status, second.status) == (200, 200), (first.body, second.body)
            assert second.token_ids == solo.token_ids
            told = [line["event"] for line in read_story(Path(pair.spec.state_dir) / "story", transfer_id)]
            assert told.count("allocated") == told.count("registered") == 1, "a second remote load"
        if tokens > 10:  # else the one may be through before the other's KV is there
            assert await metric(legs, legs.decode, "num_preemptions_total") > before, "the pool was never short"
        await at_baseline(legs, legs.prefill, 10.0)
        await at_baseline(legs, legs.decode, 10.0)
