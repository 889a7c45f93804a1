"""`vllm bench serve` as a module: `python -m kvferry.bench.vllm_serve ARGS`, where vLLM's own command cannot start
(its CPU build lacks the distribution that the command looks up).

What is measured is vLLM's, untouched. Two things are noted beside it, since its result does not tell them, in the JSON
file that `$KVFERRY_BENCH_NOTES` names: when each request was due, and how the warm-up requests ended. The due times
come from vLLM's own scheduling code, run once more beforehand with the same random numbers and a clock that does not
wait.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

NOTES = "KVFERRY_BENCH_NOTES"


class _Clock:
    """Stands in for the modules `time` and `asyncio` in vLLM's scheduling: sleeping moves it on at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def due_times(serve: Any, scheduled: Any, args: Any, kwargs: Any) -> list[float]:
    """Seconds after the start. The random state is as before afterwards."""
    clock, state = _Clock(), np.random.get_state()
    real = serve.time, serve.asyncio
    serve.time = serve.asyncio = clock
    try:
        return [clock.now async for _ in scheduled(*args, **kwargs)]
    finally:
        serve.time, serve.asyncio = real
        np.random.set_state(state)


def watch(serve: Any, backend: str) -> dict[str, Any]:
    """Have vLLM's module tell; returns what it fills in. `begun`: on the clock of vLLM's `start_times`."""
    notes: dict[str, Any] = {"due": [], "begun": None, "warm_ups": 0}
    scheduled, ask = serve.get_request, serve.ASYNC_REQUEST_FUNCS[backend]

    async def get_request(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        notes["due"] = await due_times(serve, scheduled, args, kwargs)
        notes["begun"] = time.perf_counter()
        async for item in scheduled(*args, **kwargs):
            yield item

    async def request(*args: Any, **kwargs: Any) -> Any:
        warm_up = notes["begun"] is None
        output = await ask(*args, **kwargs)
        if warm_up and output.success:
            notes["warm_ups"] += 1
        return output

    serve.get_request = get_request
    serve.ASYNC_REQUEST_FUNCS[backend] = request
    return notes


def main(argv: list[str]) -> int:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser(description="vLLM's load generator.")
    serve.add_cli_args(parser)
    args = parser.parse_args(argv)
    notes = watch(serve, args.backend)
    serve.main(args)
    if os.environ.get(NOTES):
        Path(os.environ[NOTES]).write_text(json.dumps(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
