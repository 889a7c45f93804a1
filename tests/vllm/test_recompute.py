"""`kv_load_failure_policy: recompute`: KV that changed on its way, or that is another prompt's, is computed on D."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_tier import Legs, asking, at_baseline, deployed, key_of, landing_params, side_channel, source_params

from kvferry.ids import new_transfer_id
from kvferry.launch.deployment import Deployment
from kvferry.story import read_story
from kvferry.transfer import inquiry

ENGINE = Path(__file__).with_name("flipping_engine.py")
TOKENS = 16


@pytest.fixture(scope="module")
def flip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flip") / "now"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, flip: Path) -> Iterator[Deployment]:
    how: dict[str, Any] = {"mode": "push", "dtype": "float32", "extra_config": {"verify_kv": "full"}}
    how |= {"kv_load_failure_policy": "recompute", "env": {"KVFERRY_TEST_FLIP": str(flip)}}
    args = ("--block-size", "32", "--no-enable-prefix-caching")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_ENGINE_COMMAND", f"{sys.executable} {ENGINE}")
        with deployed(tmp_path_factory.mktemp("recompute"), vllm_args=args, **how) as deployment:
            yield deployment


@pytest.fixture
async def legs(pair: Deployment, flip: Path) -> AsyncIterator[Legs]:
    async with asking() as session:
        legs = Legs(session, pair)
        yield legs
        set_flip(flip, False)
        await at_baseline(legs, legs.prefill, 10.0)
        await at_baseline(legs, legs.decode, 10.0)


def set_flip(flip: Path, on: bool) -> None:
    if on:
        flip.touch()
    else:
        flip.unlink(missing_ok=True)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 48_000) for _ in range(length)]


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
async def test_a_flipped_byte_is_computed_anew(mode: str, legs: Legs, pair: Deployment, flip: Path) -> None:
    prompt = prompt_of(300, 1)
    solo = await legs.ask(legs.decode, prompt, TOKENS)
    for bad in (True, False):
        set_flip(flip, bad)
        transfer_id, first, second = await legs.transfer(mode, prompt, TOKENS)
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert second.token_ids == solo.token_ids
        verdict = await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))
        assert verdict.state == ("failed" if bad else "ok")
        if bad:
            assert verdict.code == "kv_mismatch" and verdict.reason.startswith("layer 15, block "), verdict.reason
            assert "prefill-0 rank 0" in verdict.reason and "landed on decode-0 rank 0" in verdict.reason
        told = [line for line in read_story(Path(pair.spec.state_dir) / "story", transfer_id) if line.get("depth")]
        assert [(line["event"], line["depth"]) for line in told] == [("digested", "full"), ("verified", "full")]


async def test_another_prompt_under_the_same_id_is_computed_on_d(legs: Legs) -> None:
    mine, other = prompt_of(200, 2), prompt_of(200, 3)
    solo = await legs.ask(legs.decode, mine, TOKENS)
    transfer_id = new_transfer_id()
    first, second = await asyncio.gather(
        legs.ask(legs.prefill, other, 1, source_params(transfer_id, "push")),
        legs.ask(legs.decode, mine, TOKENS, landing_params(transfer_id, "push", legs.prefill)),
    )
    assert (first.status, second.status) == (200, 200), (first.body, second.body)
    assert second.token_ids == solo.token_ids
    verdict = await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))
    assert verdict.code == "prompt_mismatch" and "the first 199 token ids differ" in verdict.reason
