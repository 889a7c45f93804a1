"""What a router adds: the same scripted engines asked directly, through ours, and through another, in alternation.

The router has one core to itself; engines and load share the others. `direct` asks the decode engine alone, so what a
router adds has the prefill leg in it.
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvferry.bench.pinned import pinned
from kvferry.bench.router_client import Client, Seen
from kvferry.bench.stats import summary
from kvferry.errors import ConfigError, LaunchError
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.launch.web import healthy

START_S = 30.0
DIRECT = "direct"
OURS = {"kvferry-push": ("kvferry", "push"), "kvferry-upstream-pull": ("upstream-pull", "")}
PEER = "vllm-router"
TARGETS = (DIRECT, *OURS, PEER)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`step_ms`: of the decode engine, one chunk per stream and step. `seconds`: of each load, per round. `streams`:
    open at once where throughput is measured, for answers of `long_chunks`."""

    targets: tuple[str, ...]
    qps: tuple[float, ...]
    rounds: int
    seconds: float
    chunks: int
    step_ms: float
    streams: int
    long_chunks: int
    peer_command: str
    seed: int


class Load(msgspec.Struct, kw_only=True):
    """All that one target did at one rate. `cpu_s`: of the router's process, over all requests."""

    seen: list[Seen] = []
    cpu_s: float = 0.0


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    chunks_per_s: float
    errors: int


class Measured(msgspec.Struct, kw_only=True):
    loads: dict[tuple[str, float], Load] = {}
    throughput: dict[str, list[Throughput]] = {}
    rss_mib: dict[str, float] = {}


def measure(job: Job, say: Callable[[str], None]) -> Measured:
    """Raises `ConfigError` without two cores or without the peer's program, `LaunchError` if a process doesn't come."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("the router needs a core to itself: this process may use one", hint="two cores or more")
    measured = Measured()
    with pinned(cores[:-1]), ExitStack() as stack:
        short = stack.enter_context(_engines(job.chunks, job.step_ms))
        long = stack.enter_context(_engines(job.long_chunks, 1.0))
        asked = {name: stack.enter_context(_target(name, job, short, cores[-1])) for name in job.targets}
        flooded = {name: stack.enter_context(_target(name, job, long, cores[-1])) for name in job.targets}
        for round_ in range(job.rounds):
            for rate in job.qps:
                for name in _turned(job.targets, round_):
                    load = measured.loads.setdefault((name, rate), Load())
                    seen = _load(asked[name], job, rate, load, round_)
                    wrong = next((f"; {one.error}" for one in seen if one.error), "")
                    middle = summary([one.ttft_s * 1e3 for one in seen if not one.error])["p50"]
                    say(f"round {round_ + 1}, {rate:g} req/s, {name}: TTFT {middle} ms, {len(seen)} requests{wrong}")
            for name in _turned(job.targets, round_):
                got = _flood(flooded[name], job)
                measured.throughput.setdefault(name, []).append(got)
                say(f"round {round_ + 1}, {job.streams} streams, {name}: {got.chunks_per_s:,.0f} chunks/s")
        measured.rss_mib = {name: one.rss_mib() for name, one in flooded.items() if one.process is not None}
    return measured


def _turned(targets: Sequence[str], round_: int) -> Sequence[str]:
    return targets if round_ % 2 == 0 else targets[::-1]


class Engines(msgspec.Struct, frozen=True):
    prefill: int
    decode: int
    side: int


class Target:
    """Where load goes, and what its process used. `process` None: the engine itself."""

    def __init__(self, port: int, process: psutil.Process | None) -> None:
        self.port, self.process = port, process

    def cpu_s(self) -> float:
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return 0.0 if self.process is None else self.process.memory_info().rss / 2**20


@contextmanager
def _engines(chunks: int, step_ms: float) -> Iterator[Engines]:
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.bench.router_engines", str(chunks), str(step_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            said = process.stdout.readline().split()
            if len(said) != 3:
                raise LaunchError(f"the scripted engines ended with exit code {process.wait()}")
            yield Engines(*map(int, said))
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def _target(name: str, job: Job, engines: Engines, core: int) -> Iterator[Target]:
    if name == DIRECT:
        yield Target(engines.decode, None)
        return
    ports = Ports()
    port = ports.free()
    ports.release()
    command = _peer(job.peer_command, engines, port) if name == PEER else _ours(name, engines, port)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    except OSError as error:
        hint = "pip install vllm-router, in an environment of its own; --peer-command PATH names the program"
        raise ConfigError(f"--targets {name}: {command[0]}: {error.strerror}", hint=hint) from None
    try:
        _wait(name, process, port)
        yield Target(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ours(name: str, engines: Engines, port: int) -> list[str]:
    connector, mode = OURS[name]
    prefill, decode = f"http://{LOOPBACK}:{engines.prefill}", f"http://{LOOPBACK}:{engines.decode}"
    if mode:
        prefill += f",side_channel={LOOPBACK}:{engines.side}"
        decode += f",side_channel={LOOPBACK}:{engines.side + 1}"
    line = [sys.executable, "-m", "kvferry.cli", "router", "--port", str(port), "--connector", connector]
    line += ["--log-level", "error"]  # as the peer
    return [*line, "--prefill", prefill, "--decode", decode, *(["--mode", mode] if mode else [])]


def _peer(command: str, engines: Engines, port: int) -> list[str]:
    prefill, decode = f"http://{LOOPBACK}:{engines.prefill}", f"http://{LOOPBACK}:{engines.decode}"
    line = [*shlex.split(command), "--host", LOOPBACK, "--port", str(port), "--vllm-pd-disaggregation"]
    legs = ["--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--kv-connector", "nixl"]
    ports = Ports()
    metrics = ports.free()
    ports.release()
    return [*line, *legs, "--log-level", "error", "--prometheus-port", str(metrics)]


def _wait(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    """Until it answers a request whole."""
    url, limit = f"http://{LOOPBACK}:{port}", time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise LaunchError(f"{name} ended with exit code {process.returncode} while starting")
        if healthy(url) and not asyncio.run(_first(port)).error:
            return
        time.sleep(0.2)
    raise LaunchError(f"{name} does not answer after {START_S:g} s")


async def _first(port: int) -> Seen:
    client = Client(port, 0, 5.0)
    try:
        seen = await client.one(time.perf_counter())
    finally:
        client.close()
    # any whole stream will do: how many events it has is for the load to judge
    return msgspec.structs.replace(seen, error="" if "events" in seen.error and seen.error[0] != "0" else seen.error)


def _load(target: Target, job: Job, rate: float, load: Load, round_: int) -> list[Seen]:
    draw = random.Random(f"{job.seed}:{round_}:{rate}")  # the same arrivals for each target
    due, at = [], 0.0
    while at < job.seconds:
        due.append(at)
        at += draw.expovariate(rate)
    before = target.cpu_s()
    seen = asyncio.run(_at_times(target.port, job, due))
    load.cpu_s += target.cpu_s() - before
    load.seen += seen
    return seen


async def _at_times(port: int, job: Job, due: Sequence[float]) -> list[Seen]:
    client = Client(port, job.chunks + 2, 30.0)
    try:
        return await client.at_times(due)
    finally:
        client.close()


def _flood(target: Target, job: Job) -> Throughput:
    begun = time.perf_counter()
    seen = asyncio.run(_at_once(target.port, job))
    whole = [one for one in seen if not one.error]
    return Throughput(
        chunks_per_s=len(whole) * job.long_chunks / (time.perf_counter() - begun), errors=len(seen) - len(whole)
    )


async def _at_once(port: int, job: Job) -> list[Seen]:
    client = Client(port, job.long_chunks + 2, 120.0)
    try:
        now = time.perf_counter()
        return list(await asyncio.gather(*(client.one(now) for _ in range(job.streams))))
    finally:
        client.close()


def facts_of(job: Job, measured: Measured, environment: dict[str, Any]) -> dict[str, Any]:
    """The keys of the JSON file; milliseconds."""
    points = []
    for rate in job.qps:
        base = _ttft(measured.loads[DIRECT, rate]) if DIRECT in job.targets else {}
        for name in job.targets:
            load = measured.loads[name, rate]
            ttft, done = _ttft(load), [one for one in load.seen if not one.error]
            point = {
                "target": name,
                "qps": rate,
                "num": len(load.seen),
                "errors": len(load.seen) - len(done),
                "ttft_ms": ttft,
                "e2e_ms": summary([one.e2e_s * 1e3 for one in done]),
                "late_ms": summary([one.late_s * 1e3 for one in load.seen]),
                "cpu_ms_per_request": round(load.cpu_s * 1e3 / len(load.seen), 3),
            }
            if base and name != DIRECT:
                point["added_ms"] = {key: _difference(ttft[key], base[key]) for key in ("p50", "p90", "p99")}
            points.append(point)
    flood = {
        name: {"chunks_per_s": summary([one.chunks_per_s for one in got], 0), "errors": sum(one.errors for one in got)}
        for name, got in measured.throughput.items()
    }
    rss = {name: round(value, 1) for name, value in measured.rss_mib.items()}
    settings = msgspec.to_builtins(job)
    return {"points": points, "relayed": flood, "rss_mib": rss, "settings": settings, "environment": environment}


def _ttft(load: Load) -> dict[str, Any]:
    return summary([one.ttft_s * 1e3 for one in load.seen if not one.error])


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else round(a - b, 3)


def installed(command: str) -> bool:
    """Whether there is a program of that name."""
    program = Path(shlex.split(command)[0])
    return program.is_file() or any((Path(part) / program).is_file() for part in os.get_exec_path())


def default_targets(command: str) -> tuple[str, ...]:
    return TARGETS if installed(command) else tuple(name for name in TARGETS if name != PEER)
