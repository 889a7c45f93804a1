"""The CPU time that a render tier takes off the engines' hosts: the same chats through a pair without and with it.

The chats share all but their last words, and prefix caching is on: the engines compute little, as in a conversation,
while whoever renders has the whole prompt to make ids of. What the processes use when nobody asks is measured and
taken off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.bench.render_http import Line
from kvferry.bench.render_script import Tokens, chat, prompt_text
from kvferry.bench.render_servers import clock_of
from kvferry.bench.render_stream import CHAT
from kvferry.errors import EngineError
from kvferry.launch.cancel import Cancel
from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec

WARM = 3
IDLE_S = 10.0


class HostsJob(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` chats of `prompt_tokens` in and `output_tokens` out, one at a time, to one engine of each role."""

    model: str
    prompt_tokens: int
    output_tokens: int
    requests: int
    max_model_len: int
    seed: int


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """CPU ms per request, by process: 'prefill-0 api', 'prefill-0 core', 'render', 'router'. `idle_ms_per_s`: what was
    taken off, per second of load."""

    cpu_ms: dict[str, float]
    idle_ms_per_s: dict[str, float]
    e2e_ms: list[float]


def measure_hosts(job: HostsJob, tokenizer: Tokens, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Both deployments, mode push, one after the other. Raises `EngineError` if a request fails, and `LaunchError`."""
    spent = {}
    for name, workers in (("without", 0), ("with", 1)):
        spec = DeploymentSpec(
            mode="push",
            model=job.model,
            render=workers,
            vllm_args=["--max-model-len", str(job.max_model_len), "--enable-prefix-caching"],
            state_dir=folder / name,
        )
        say(f"{name} a render tier: starting")
        with Deployment(spec, report=say, cancel=Cancel()) as deployment:
            spent[name] = _through(deployment, job, tokenizer)
        total = sum(value for process, value in spent[name].cpu_ms.items() if process.endswith("api"))
        say(f"{name} a render tier: the engines' API servers take {total:.1f} ms CPU a request")
    return facts_of(job, spent)


def _through(deployment: Deployment, job: HostsJob, tokenizer: Tokens) -> Spent:
    shared = prompt_text(tokenizer, job.prompt_tokens, job.seed)
    bodies = [
        chat(f"{shared} Question {number}?", job.output_tokens, "none") | {"model": deployment.model_name()}
        for number in range(WARM + job.requests)
    ]
    port = int(deployment.router_url.rpartition(":")[2])
    took: list[float] = []
    with Line(port) as line:
        for body in bodies[:WARM]:
            _ask(line, body)
        quiet = _clocks(deployment)
        time.sleep(IDLE_S)
        before = _clocks(deployment)
        for body in bodies[WARM:]:
            begun = time.perf_counter()
            _ask(line, body)
            took.append((time.perf_counter() - begun) * 1e3)
        after = _clocks(deployment)
    idle = {name: (before[name] - quiet[name]) * 1e3 / IDLE_S for name in before}
    seconds = sum(took) / 1e3
    used = {name: ((after[name] - before[name]) * 1e3 - idle[name] * seconds) / job.requests for name in before}
    return Spent(
        cpu_ms={name: round(value, 3) for name, value in used.items()},
        idle_ms_per_s={name: round(value, 3) for name, value in idle.items()},
        e2e_ms=took,
    )


def _ask(line: Line, body: dict[str, Any]) -> None:
    answer = line.ask("POST", CHAT, msgspec.json.encode(body))
    if answer.status != 200 or not answer.body.endswith(b"data: [DONE]\n\n"):
        raise EngineError(f"a chat was answered {answer.status}: {answer.body[-300:].decode(errors='replace')}")


def _clocks(deployment: Deployment) -> dict[str, float]:
    """CPU seconds by process. An engine's first process is its API server, what that started is its core."""
    found: dict[str, float] = {}
    for engine in deployment.engines:
        for pid in engine.pids():
            name = f"{engine.name} {'api' if pid == engine.pid else 'core'}"
            found[name] = found.get(name, 0.0) + time.clock_gettime(clock_of(pid))
    for process in deployment.fronts():
        found[process.name] = sum(time.clock_gettime(clock_of(pid)) for pid in process.pids())
    return found


def facts_of(job: HostsJob, spent: dict[str, Spent]) -> dict[str, Any]:
    processes = {
        name: {side: one.cpu_ms.get(name, 0.0) for side, one in spent.items()}
        for name in sorted({name for one in spent.values() for name in one.cpu_ms})
    }
    totals = {
        side: round(sum(value for name, value in one.cpu_ms.items() if name.endswith("api")), 3)
        for side, one in spent.items()
    }
    e2e = {side: round(statistics.median(one.e2e_ms), 1) for side, one in spent.items()}
    return {
        "settings": msgspec.to_builtins(job),
        "cpu_ms_per_request": processes,
        "idle_ms_per_s": {side: one.idle_ms_per_s for side, one in spent.items()},
        "api_servers_cpu_ms": totals,
        "left_share": round(1 - totals["with"] / totals["without"], 3),
        "e2e_p50_ms": e2e,
    }


def text(facts: dict[str, Any]) -> Sequence[tuple[str, ...]]:
    """Rows of the table."""
    rows: list[tuple[str, ...]] = [("CPU ms a request", "without", "with")]
    for name, sides in facts["cpu_ms_per_request"].items():
        rows.append((name, f"{sides['without']:.1f}", f"{sides['with']:.1f}"))
    totals, e2e = facts["api_servers_cpu_ms"], facts["e2e_p50_ms"]
    rows.append(("API servers together", f"{totals['without']:.1f}", f"{totals['with']:.1f}"))
    rows.append(("whole answer, p50 ms", f"{e2e['without']:.0f}", f"{e2e['with']:.0f}"))
    return rows
