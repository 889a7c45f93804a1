"""Byte-exact and token-identical: what lands on D is what P computed, and the answer is one plain vLLM's.

float32, so that greedy tokens don't hang on rounding; 32-token blocks, so that short prompts have several.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_tier import Legs, asking, deployed, metric

from kvferry.launch.deployment import Deployment
from kvferry.story import read_lines

BLOCK = 32
TOKENS = 32
FIXED = (1, 2, 5, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 500, 512, 513, 1000, 2000, 3000)
ENGINE = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "512")
PAIR = {"dtype": "float32", "mode": "push", "extra_config": {"audit": True, "verify_kv": "full"}}


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 48_000) for _ in range(length)]


def cold_prompts() -> list[list[int]]:
    rng = random.Random(1)
    lengths = [*FIXED, *(rng.randrange(3, 160) for _ in range(60 - len(FIXED)))]
    return [random_prompt(rng, length) for length in lengths]


def shared_prompts() -> list[list[int]]:
    """In the order to ask them: each family's first is cold, its others share a prefix of it."""
    rng = random.Random(2)
    out = []
    for length in (5, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 5, 10 * BLOCK):
        first = random_prompt(rng, length)
        out.append(first)
        for shared in (BLOCK // 2, BLOCK, length):
            out.append(first[:shared] + random_prompt(rng, max(0, length - shared)))
        out.append(first + random_prompt(rng, 40))
    return out


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> tokens of one plain vLLM."""
    prompts = cold_prompts() + shared_prompts()

    async def ask_all(deployment: Deployment) -> dict[tuple[int, ...], list[int]]:
        async with asking() as session:
            legs = Legs(session, deployment)
            gate = asyncio.Semaphore(8)

            async def one(prompt: list[int]) -> tuple[tuple[int, ...], list[int]]:
                async with gate:
                    reply = await legs.ask(legs.decode, prompt, TOKENS)
                assert reply.status == 200, reply.body
                return tuple(prompt), reply.token_ids

            return dict(await asyncio.gather(*map(one, prompts)))

    tmp = tmp_path_factory.mktemp("plain")
    with deployed(tmp, mode="colocated", dtype="float32", vllm_args=ENGINE) as deployment:
        return asyncio.run(ask_all(deployment))


def audits(state_dir: Path) -> dict[str, dict[str, tuple[int, list[str]]]]:
    """transfer id -> side -> (first logical block, digest per block)."""
    out: dict[str, dict[str, tuple[int, list[str]]]] = {}
    for line in read_lines(state_dir / "story"):
        if line["event"] == "audit":
            out.setdefault(line["transfer_id"], {})[line["side"]] = (line["first_block"], line["digests"])
    return out


def check_bytes(state_dir: Path, moved: dict[str, tuple[int, int]]) -> int:
    """Every block that D received equals P's, and D received just the blocks it should. Returns how many."""
    seen = audits(state_dir)
    total = 0
    for transfer_id, (first, last) in moved.items():
        if first == last:
            assert seen.get(transfer_id, {}).get("decode", (0, []))[1] == [], "nothing was to move"
            continue
        _, source = seen[transfer_id]["prefill"]
        start, landed = seen[transfer_id]["decode"]
        assert (start, start + len(landed)) == (first, last)
        assert landed == source[first:last]
        total += len(landed)
    return total


def verified(state_dir: Path) -> set[str]:
    """Transfers of which every byte was compared before the first token."""
    lines = read_lines(state_dir / "story")
    return {line["transfer_id"] for line in lines if line["event"] == "verified" and line["depth"] == "full"}


def released(state_dir: Path) -> dict[str, bool]:
    return {line["transfer_id"]: line["ok"] for line in read_lines(state_dir / "story") if line["event"] == "released"}


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    off = (*ENGINE, "--no-enable-prefix-caching")
    with deployed(tmp_path_factory.mktemp("cold"), vllm_args=off, **PAIR) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    how = {**PAIR, "extra_config": {**PAIR["extra_config"], "staging": "always", "staging_bytes": 1 << 20}}
    with deployed(tmp_path_factory.mktemp("caching"), vllm_args=(*ENGINE, "--enable-prefix-caching"), **how) as one:
        yield one


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
async def test_cold_prompts_eight_at_a_time(
    mode: str, expected: dict[tuple[int, ...], list[int]], cold: Deployment
) -> None:
    """C47 cold, C60: every length, with 8 requests in flight; P lets go of every transfer, well."""
    gate = asyncio.Semaphore(8)
    async with asking() as session:
        legs = Legs(session, cold)

        async def one(prompt: list[int]) -> tuple[str, int]:
            async with gate:
                transfer_id, first, second = await legs.transfer(mode, prompt, TOKENS)
            assert (first.status, second.status) == (200, 200), (first.body, second.body)
            assert second.token_ids == expected[tuple(prompt)], f"prompt of {len(prompt)} tokens"
            assert second.body["usage"]["prompt_tokens"] == len(prompt)
            return transfer_id, len(prompt)

        done = await asyncio.gather(*(one(prompt) for prompt in cold_prompts()))
    state_dir = Path(cold.spec.state_dir)
    moved = {transfer_id: (0, -(-(length - 1) // BLOCK)) for transfer_id, length in done}
    assert check_bytes(state_dir, moved) == sum(last for _, last in moved.values()) > 300
    ends = released(state_dir)
    assert all(ends[transfer_id] for transfer_id, _ in done)
    assert verified(state_dir) >= {transfer_id for transfer_id, length in done if length > 1}
    await metrics_agree_with_the_story(cold)


async def metrics_agree_with_the_story(deployment: Deployment) -> None:
    """vLLM's server exports what the ranks' transfers did, to the byte; its numbers follow its steps by moments."""
    lines = list(read_lines(Path(deployment.spec.state_dir) / "story"))
    posts = [line for line in lines if line["event"] == "posted"]
    allocated = [line for line in lines if line["event"] == "allocated"]
    expected = {
        "vllm:nixl_bytes_transferred_sum": sum(post["nbytes"] for post in posts),
        "vllm:nixl_bytes_transferred_count": len(posts),
        "vllm:nixl_num_descriptors_sum": sum(post["descriptors"] for post in posts),
        "kvferry:blocks_per_landing_sum": sum(line["blocks"] for line in allocated),
        "kvferry:block_runs_sum": sum(line["runs"] for line in allocated),
        "kvferry:transfers_total": sum(line["event"] in ("released", "landed") for line in lines),
        "kvferry:open_sources": 0,
        "kvferry:open_landings": 0,
        "kvferry:posts_in_flight": 0,
    }
    async with asking() as session, asyncio.timeout(10.0):
        legs = Legs(session, deployment)
        while True:
            found = {
                name: await metric(legs, legs.prefill, name) + await metric(legs, legs.decode, name)
                for name in expected
            }
            if found == expected:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
async def test_shared_prefixes(mode: str, expected: dict[tuple[int, ...], list[int]], caching: Deployment) -> None:
    """C45, C46, C47: with prefixes of half a block, one block, all blocks cached on both sides, only the rest moves."""
    # The salt makes a cache namespace of each mode, so that the second starts cold too.
    seen: list[list[int]] = []
    moved = {}
    async with asking() as session:
        legs = Legs(session, caching)
        for prompt in shared_prompts():
            transfer_id, first, second = await legs.transfer(mode, prompt, TOKENS, cache_salt=mode)
            assert (first.status, second.status) == (200, 200), (first.body, second.body)
            assert second.token_ids == expected[tuple(prompt)], f"prompt of {len(prompt)} tokens"
            hit = max((common(prompt, other) for other in seen), default=0)
            hit = min(hit, len(prompt) - 1) // BLOCK
            moved[transfer_id] = (hit, max(hit, -(-(len(prompt) - 1) // BLOCK)))
            seen.append(prompt + second.token_ids[:-1])
    state_dir = Path(caching.spec.state_dir)
    assert check_bytes(state_dir, moved) == sum(last - first for first, last in moved.values()) > 0
    assert any(first == last for first, last in moved.values()), "no full hit was tried"
    ends = released(state_dir)
    assert all(ends[transfer_id] for transfer_id in moved)
    assert verified(state_dir) >= {transfer_id for transfer_id, (first, last) in moved.items() if first < last}


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
