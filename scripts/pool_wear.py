"""How scattered a decode engine's blocks get as its pool is used: `python scripts/pool_wear.py --help`.

Starts one prefill and one decode engine of real vLLM on the CPU, with a pool so small that blocks are used again and
again, sends requests of mixed lengths through the router, and reads from the story what each landing was given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec
from kvferry.story import read_lines

SHORTEST, LONGEST = 64, 1500  # prompt tokens; as many between 64 and 128 as between 750 and 1500
FEWEST, MOST = 4, 64  # output tokens
GROUP = 20
HEAD = f"{'requests':<10}{'blocks':>8}{'runs':>8}{'blocks per run':>16}{'descriptors per block':>23}"


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(least * (most / least) ** draw.random())


async def load(url: str, model: str, requests: int, at_once: int, seed: int) -> None:
    draw, gate = random.Random(seed), asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(body: Mapping[str, Any]) -> None:
            async with gate, session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise SystemExit(f"a request failed: {await response.text()}")

        bodies = []
        for _ in range(requests):
            prompt = [draw.randrange(100, 48_000) for _ in range(log_uniform(draw, SHORTEST, LONGEST))]
            tokens = log_uniform(draw, FEWEST, MOST)
            bodies.append({"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True})
        await asyncio.gather(*map(one, bodies))


def landings(folder: Path) -> list[tuple[int, int, int]]:
    """(blocks, runs, descriptors) of each, in the order in which their blocks were allocated."""
    allocated, descriptors = [], {}
    for line in read_lines(folder):
        if line["event"] == "allocated" and line["blocks"]:
            allocated.append(line)
        elif line["event"] == "posted":
            descriptors[line["transfer_id"]] = line["descriptors"]
    allocated.sort(key=lambda line: line["t"])
    return [(line["blocks"], line["runs"], descriptors[line["transfer_id"]]) for line in allocated]


def row(name: str, some: Sequence[tuple[int, int, int]]) -> str:
    per_run = median(blocks / runs for blocks, runs, _ in some)
    per_block = median(descriptors / blocks for blocks, _, descriptors in some)
    blocks, runs = median(one[0] for one in some), median(one[1] for one in some)
    return f"{name:<10}{blocks:>8.0f}{runs:>8.1f}{per_run:>16.2f}{per_block:>23.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help=f"at least {2 * GROUP} (default 100)")
    parser.add_argument("--at-once", type=int, default=6, help="in flight at the same time (default 6)")
    parser.add_argument("--blocks", type=int, default=256, help="of each engine's pool (default 256, of 32 tokens)")
    parser.add_argument("--prefix-caching", action="store_true", help="as vLLM does unless it is told otherwise")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.requests < 2 * GROUP:
        parser.error(f"--requests: {args.requests}, expected at least {2 * GROUP}: the first {GROUP} and the last")
    caching = "--enable-prefix-caching" if args.prefix_caching else "--no-enable-prefix-caching"
    pool = ("--block-size=32", f"--num-gpu-blocks-override={args.blocks}", "--max-model-len=2048", caching)
    with tempfile.TemporaryDirectory() as folder:
        spec = DeploymentSpec(mode="push", vllm_args=pool, state_dir=folder, warm_up=False)
        with Deployment(spec) as deployment:
            url, model = deployment.router_url, deployment.model_name()
            asyncio.run(load(url, model, args.requests, args.at_once, args.seed))
        seen = landings(Path(folder) / "story")
    print(HEAD)
    for name, some in ((f"first {GROUP}", seen[:GROUP]), (f"last {GROUP}", seen[-GROUP:]), ("all", seen)):
        print(row(name, some))


if __name__ == "__main__":
    main()
