"""TTFT with decode's and with prefill's own first token, by turns, on engines with a timing model.

    python scripts/first_token.py --mode pull --mode stream --tokens 4000 --num 24

One request at a time, each prompt another one, the same ones in every turn. Exit code 1 if the answers of the turns are
not equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec

BIND = {"pull": (), "stream": ("--bind", "late")}
OUTPUT_TOKENS = 16
WARM = 3
"""Requests of each turn that don't count."""


@dataclass
class Turn:
    """Seconds, of each request."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def line(self) -> str:
        parts = (("TTFT", self.first), ("first to second token", self.second), ("whole", self.whole))
        return ", ".join(f"{name} {statistics.median(times[WARM:]) * 1e3:.1f} ms" for name, times in parts)


async def ask_all(url: str, model: str, tokens: int, count: int) -> Turn:
    turn, draw = Turn(), random.Random(5)
    async with aiohttp.ClientSession() as session:
        for _ in range(count + WARM):
            body = {
                "model": model,
                "token_ids": [draw.randrange(300, 30_000) for _ in range(tokens)],
                "sampling_params": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0},
                "stream": True,
            }
            begun, times, ids = time.monotonic(), list[float](), list[int]()
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                while event := await response.content.readline():
                    if event.startswith(b"data: {"):
                        ids += json.loads(event[6:])["choices"][0]["token_ids"]
                        times.append(time.monotonic() - begun)
            turn.first.append(times[0])
            turn.second.append(times[min(1, len(times) - 1)] - times[0])  # one event where all came at once
            turn.whole.append(times[-1])
            turn.answers.append(ids)
    return turn


def take(mode: str, by: str, args: argparse.Namespace) -> Turn:
    with tempfile.TemporaryDirectory() as folder:
        spec = DeploymentSpec(
            mode=mode,
            engine="sim",
            profile=args.profile,
            state_dir=Path(folder) / "state",
            vllm_args=(f"--byte-scale={args.byte_scale}", "--no-enable-prefix-caching"),
            router_args=(*BIND[mode], "--first-token", by),
        )
        with Deployment(spec, report=lambda _: None) as deployment:
            return asyncio.run(ask_all(deployment.router_url, deployment.model_name(), args.tokens, args.num))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=sorted(BIND), help="can be repeated (default: both)")
    parser.add_argument("--tokens", type=int, default=4000, help="of each prompt (default: %(default)s)")
    parser.add_argument("--num", type=int, default=24, help="requests that count, in each turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--profile", default="qwen3-32b-h200-tp8", help="of the engines (default: %(default)s)")
    parser.add_argument("--byte-scale", type=int, default=512, help="KV bytes moved: one of so many (default: 512)")
    args = parser.parse_args(argv)
    answers = list[list[list[int]]]()
    for mode in args.mode or sorted(BIND):
        for _ in range(args.rounds):
            for by in ("decode", "prefill"):
                turn = take(mode, by, args)
                answers.append(turn.answers)
                print(f"{mode}, first token by {by}: {turn.line()}", flush=True)
    equal = all(one == answers[0] for one in answers)
    print(f"answers: {'equal' if equal else 'NOT EQUAL'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
