"""Two transport-real engines and a router: every answer right in every mode, and no damaged byte unseen."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from sim_tier import Ask, ask_all, asks, inject, right, simulated

from kvferry.story import read_lines

MODES = ("colocated", "pull", "pull-inline", "push", "stream")
FAULTS = ("--enable-faults",)
EAGER = {"stream_chunk_bytes": 1}
STAGED = {"staging": "always", "staging_bytes": 1 << 18}
NO_CACHE = ("--no-enable-prefix-caching",)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(300)
def test_two_thousand_random_requests_get_two_thousand_right_answers(mode: str, tmp_path: Path) -> None:
    asked = asks(2000, seed=MODES.index(mode))
    with simulated(tmp_path, mode) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked))
    wrong = [(ask, one) for ask, one in zip(asked, got, strict=True) if one.tokens != right(ask)]
    assert not wrong, f"{len(wrong)} of {len(asked)}, first: {wrong[0]}"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (("--tp=2",), ("--tp=1",)),
        (("--tp=1", "--block-size=32"), ("--tp=4", "--block-size=16")),
        (("--tp=4", "--block-size=16"), ("--tp=2", "--block-size=64")),
    ],
    ids=["tp2-tp1", "tp1-tp4-blocks32-16", "tp4-tp2-blocks16-64"],
)
@pytest.mark.parametrize("mode", ["push", "push, staged", "pull", "pull, staged", "stream", "stream, staged"])
def test_unequal_engines(mode: str, prefill: tuple[str, ...], decode: tuple[str, ...], tmp_path: Path) -> None:
    asked = asks(60, seed=1)
    mode, _, staged = mode.partition(", ")
    chunks = ("--max-num-batched-tokens=100",) if mode == "stream" else ()
    extra = {**(EAGER if mode == "stream" else {}), **(STAGED if staged else {})}
    extra |= {"pull_by": "write"} if mode == "pull" and staged else {}
    how = {"prefill_args": (*prefill, *chunks), "decode_args": decode, "extra_config": extra}
    with simulated(tmp_path, mode, **how) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=8))
    assert [one.tokens for one in got] == [right(ask) for ask in asked]
    posts = [line for line in read_lines(tmp_path / "state" / "story") if line["event"] == "posted"]
    assert posts and any(post["staged"] for post in posts) >= bool(staged)


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
def test_small_pools_preempt_and_answers_stay_right(mode: str, tmp_path: Path) -> None:
    asked = [Ask(ask.prompt[:150], 60) for ask in asks(120, seed=4)]
    args = ("--num-gpu-blocks-override=96", "--max-model-len=1024", *NO_CACHE)
    with simulated(tmp_path, mode, vllm_args=args) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=24))
    assert [one.tokens for one in got] == [right(ask) for ask in asked]


@pytest.mark.parametrize("bind", ["early", "late", "at=40"])
def test_prompts_that_are_streamed_and_preempted_in_their_middle(bind: str, tmp_path: Path) -> None:
    """Long prompts in small chunks, on a P whose pool holds few of them and caches none."""
    asked = asks(150, seed=6)
    small = ("--num-gpu-blocks-override=96", "--max-model-len=1024", "--max-num-batched-tokens=64", *NO_CACHE)
    extra = {**EAGER, **STAGED} if bind == "late" else EAGER
    how = {"extra_config": extra, "router_args": ("--bind", bind)}
    with simulated(tmp_path, "stream", prefill_args=small, **how) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=24))
    assert [one.tokens for one in got] == [right(ask) for ask in asked]
    told = Counter(line["event"] for line in read_lines(tmp_path / "state" / "story"))
    assert told["rewound"] > 10
    assert told["bound"] == (0 if bind == "early" else told["received"])
    if bind == "early":
        assert told["posted"] > told["landed"], "nothing left before its prompt was done"


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_any_flipped_byte_of_a_transferred_block_changes_the_answer(mode: str, tmp_path: Path) -> None:
    draw = random.Random(11)
    asked = [Ask([draw.randrange(256, 30_000) for _ in range(draw.randrange(17, 200))], 4) for _ in range(60)]
    with simulated(tmp_path, mode, vllm_args=(*FAULTS, *NO_CACHE)) as deployment:
        decode = deployment.engine("decode-0").url

        async def run() -> None:
            for index, ask in enumerate(asked):
                bad = index % 2 == 0
                if bad:
                    await inject(decode, kind="corrupt", mask=draw.choice([1, 16, 128, 255]))
                [got] = await ask_all(deployment.router_url, deployment.model_name(), [ask])
                assert got.status == 200
                assert (got.tokens != right(ask)) == bad, ask

        asyncio.run(run())


@pytest.mark.parametrize("mode", ["push", "pull", "pull-inline"])
def test_a_scaled_model_moves_as_many_pieces_with_fewer_bytes(mode: str, tmp_path: Path) -> None:
    moved = {}
    for scale in (64, 512):
        args = (f"--byte-scale={scale}", "--num-gpu-blocks-override=2048", "--fragmentation=0.5", *NO_CACHE)
        folder = tmp_path / str(scale)
        with simulated(folder, mode, "qwen3-32b-h200-tp8", vllm_args=args, warm_up=False) as deployment:
            ask = Ask(range(256, 2256), 3)
            [got] = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), [ask]))
            assert got.tokens == right(ask, "qwen3-32b-h200-tp8", scale)
        [posted] = [line for line in read_lines(folder / "state" / "story") if line["event"] == "posted"]
        moved[scale] = posted
    assert moved[64]["descriptors"] == moved[512]["descriptors"] > 64 * 20
    blocks = -(-1999 // 16)
    assert moved[512]["nbytes"] == blocks * 16 * 64 * 8 and moved[64]["nbytes"] == 8 * moved[512]["nbytes"]
