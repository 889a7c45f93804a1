"""A byte that changes on its way never becomes a token: the request fails with the place in the reason, or is computed
anew, as `kv_load_failure_policy` says. Two transport-real engines, real NIXL."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from sim_tier import Ask, ask_all, asks, inject, right, simulated

from kvferry.launch.deployment import Deployment
from kvferry.story import read_lines

ARGS = ("--enable-faults", "--no-enable-prefix-caching")
FULL = {"verify_kv": "full", "stream_chunk_bytes": 1}


def prompts(count: int) -> list[Ask]:
    draw = random.Random(3)
    return [Ask([draw.randrange(256, 30_000) for _ in range(draw.randrange(17, 300))], 4) for _ in range(count)]


def outcomes(deployment: Deployment, asked: list[Ask]) -> list[str]:
    """One after the other, every other one with a byte flipped in flight: 'right', 'wrong', or the status."""
    decode = deployment.engine("decode-0").url
    draw = random.Random(4)
    out = []

    async def run() -> None:
        for index, ask in enumerate(asked):
            if index % 2 == 0:
                await inject(decode, kind="corrupt", when="in_flight", mask=draw.choice([1, 16, 128, 255]))
            [got] = await ask_all(deployment.router_url, deployment.model_name(), [ask])
            if got.status == 200:
                out.append("right" if got.tokens == right(ask) else "wrong")
            else:
                error = json.loads(got.body)["error"]
                assert "computed" in error["message"] and "landed on decode-0 rank 0" in error["message"], error
                assert "layer " in error["message"] and ", block " in error["message"], error
                out.append(str(got.status))

    asyncio.run(run())
    return out


@pytest.mark.parametrize("mode", ["push", "pull", "pull-inline", "stream"])
def test_each_flipped_byte_is_found_before_the_first_token(mode: str, tmp_path: Path) -> None:
    chunks = ("--max-num-batched-tokens=64",)
    with simulated(tmp_path, mode, vllm_args=ARGS, prefill_args=chunks, extra_config=FULL) as deployment:
        assert outcomes(deployment, prompts(16)) == ["502", "right"] * 8


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
def test_recompute_answers_rightly(mode: str, tmp_path: Path) -> None:
    how = {"extra_config": FULL, "kv_load_failure_policy": "recompute"}
    with simulated(tmp_path, mode, vllm_args=ARGS, **how) as deployment:
        assert outcomes(deployment, prompts(16)) == ["right"] * 16
    failed = [line for line in read_lines(tmp_path / "state" / "story") if line["event"] == "failed"]
    assert len(failed) == 8 and all("digests differ" in line["reason"] for line in failed)


def test_off_lets_them_through(tmp_path: Path) -> None:
    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config={"verify_kv": "off"}) as deployment:
        assert outcomes(deployment, prompts(8)) == ["wrong", "right"] * 4


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [
        ("push", ("--tp=4", "--block-size=16"), ("--tp=2", "--block-size=64")),
        ("pull", ("--tp=2",), ("--tp=4",)),
        ("stream", ("--block-size=32",), ("--tp=2", "--block-size=16")),
    ],
    ids=["push tp4-tp2 blocks16-64", "pull tp2-tp4", "stream tp1-tp2 blocks32-16"],
)
def test_unequal_engines_and_preempted_prompts_agree(
    mode: str, prefill: tuple[str, ...], decode: tuple[str, ...], tmp_path: Path
) -> None:
    """With every byte compared. P's pool is small, so that prompts are preempted, in a stream in their middle."""
    asked = asks(60, seed=7)
    small = ("--num-gpu-blocks-override=128", "--max-model-len=1024", "--max-num-batched-tokens=64")
    how = {"prefill_args": (*prefill, *small), "decode_args": decode, "extra_config": FULL}
    with simulated(tmp_path, mode, **how) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=12))
    assert [one.tokens for one in got] == [right(ask) for ask in asked]
    told = Counter((line["event"], line.get("depth")) for line in read_lines(tmp_path / "state" / "story"))
    assert told["verified", "full"] >= len(asked) and told["verified", "full"] == told["digested", "full"]
