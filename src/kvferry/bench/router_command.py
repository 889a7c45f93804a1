"""`kvferry bench router`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from kvferry.bench.arguments import above_zero, rates, words
from kvferry.bench.environment import environment
from kvferry.bench.points import check_writable
from kvferry.bench.report import aligned, write_json
from kvferry.bench.router_bench import DIRECT, PEER, TARGETS, Job, default_targets, facts_of, measure
from kvferry.bench.transfer_command import stoppable
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.cancel import Stopped
from kvferry.launch.commands import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--targets", type=words, metavar="A,B", help=f"of {', '.join(TARGETS)} (default: those that are installed)")
    add("--peer-command", default=PEER, metavar="CMD", help="how vLLM's Rust router is started (default: %(default)s)")
    add("--qps", type=rates, default=[200.0, 400.0], metavar="Q1,Q2", help="Poisson arrivals (default: 200,400)")
    add("--rounds", type=int, default=3, metavar="R", help="of all targets, in alternating order (default: 3)")
    add("--seconds", type=above_zero, default=10.0, metavar="S", help="of load per target, rate and round")
    add("--chunks", type=int, default=64, metavar="C", help="of one answer (default: 64)")
    add("--step-ms", type=above_zero, default=5.0, metavar="MS", help="of the decode engine: a chunk (default: 5)")
    add("--streams", type=int, default=100, metavar="N", help="open at once, for relayed chunks per second")
    add("--long-chunks", type=int, default=2000, metavar="C", help="of their answers (default: 2000)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="F", help="write everything")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if a request failed; 130 if stopped."""
    job = job_of(args)
    check_writable("--json", args.json)
    about = environment()
    try:
        with stoppable():
            facts = facts_of(job, measure(job, say), about)
    except Stopped:
        say("stopped")
        return 130
    print(text(facts), flush=True)
    if args.json:
        write_json(args.json, facts)
    failed = sum(point["errors"] for point in facts["points"]) + sum(one["errors"] for one in facts["relayed"].values())
    return 1 if failed else 0


def job_of(args: argparse.Namespace) -> Job:
    """Raises `ConfigError`."""
    for name in args.targets or ():
        if name not in TARGETS:
            raise unknown_name("target", name, TARGETS)
    for option, value in (
        ("--rounds", args.rounds),
        ("--chunks", args.chunks),
        ("--streams", args.streams),
        ("--long-chunks", args.long_chunks),
    ):
        if value < 1:
            raise ConfigError(f"{option}: {value}", hint="expected 1 or more")
    if not shlex.split(args.peer_command):
        raise ConfigError("--peer-command: ''", hint=f"for example {PEER}")
    return Job(
        targets=tuple(args.targets or default_targets(args.peer_command)),
        qps=tuple(args.qps),
        rounds=args.rounds,
        seconds=args.seconds,
        chunks=args.chunks,
        step_ms=args.step_ms,
        streams=args.streams,
        long_chunks=args.long_chunks,
        peer_command=args.peer_command,
        seed=args.seed,
    )


def text(facts: dict[str, Any]) -> str:
    head = ("target", "req/s", "TTFT p50 ms", "p99", "added p50", "added p99", "CPU ms/request", "errors")
    rows = [head]
    for point in facts["points"]:
        added = point.get("added_ms", {"p50": None, "p99": None})
        ttft = point["ttft_ms"]
        numbers = (ttft["p50"], ttft["p99"], added["p50"], added["p99"])
        cells = [_ms(value) for value in numbers]
        cpu = "" if point["target"] == DIRECT else _ms(point["cpu_ms_per_request"])
        rows.append((point["target"], f"{point['qps']:g}", *cells, cpu, str(point["errors"])))
    relayed = [("target", "chunks/s", "least", "most", "RSS MiB")]
    for name, one in facts["relayed"].items():
        rate, rss = one["chunks_per_s"], facts["rss_mib"].get(name)
        cells = [f"{rate[key] or 0:,.0f}" for key in ("p50", "min", "max")]
        relayed.append((name, *cells, "" if rss is None else f"{rss:.0f}"))
    return f"{aligned(rows)}\n\n{aligned(relayed)}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
