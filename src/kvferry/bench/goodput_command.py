"""`kvferry bench goodput`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.bench.arguments import above_zero
from kvferry.bench.environment import environment
from kvferry.bench.goodput import SHARE, ModeResult, Objectives, Workload
from kvferry.bench.goodput_search import search_modes
from kvferry.bench.load import choose
from kvferry.bench.points import check_writable
from kvferry.bench.report import aligned, write_json
from kvferry.bench.setup_arguments import add_load, add_setup, drop, rules_of, setup_of, state_folder
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel, Stopped
from kvferry.launch.commands import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Workload(0, 0)
    add_setup(parser, "colocated,pull,push")
    add = parser.add_argument
    add("--ttft", type=above_zero, required=True, metavar="MS", help="objective for the first token")
    add(
        "--itl", type=above_zero, required=True, metavar="MS", help="objective for a request's mean time between tokens"
    )
    add("--input-len", type=int, required=True, metavar="L", help="prompt tokens")
    add("--output-len", type=int, default=128, metavar="L", help="output tokens (default: 128)")
    add("--start", type=above_zero, default=default.start, metavar="Q", help="first rate tried (default: 1)")
    add("--floor", type=above_zero, default=default.floor, metavar="Q", help="lowest rate tried (default: 0.05)")
    add("--ceiling", type=above_zero, default=default.ceiling, metavar="Q", help="highest rate tried (default: 256)")
    add(
        "--seconds", type=above_zero, default=default.seconds, metavar="S", help="least length of a probe (default: 10)"
    )
    add("--json", type=Path, metavar="F", help="write everything, all probes too")
    add_load(parser, "builtin", 100)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if every mode could be judged, 1 if one was void, 130 if stopped."""
    setup, load = setup_of(args), choose(args.load)
    rules = rules_of(args, load)
    for name, value, least in (("--input-len", args.input_len, 2), ("--output-len", args.output_len, 2)):
        if value < least:
            raise ConfigError(f"{name}: {value}", hint=f"expected {least} or more")
    if args.num < 100:
        raise ConfigError(f"--num: {args.num}", hint=f"at least 100, or {SHARE:.0%} of the requests can't be told")
    if not args.floor <= args.start <= args.ceiling:
        raise ConfigError(
            f"--start: {args.start:g} is not between --floor {args.floor:g} and --ceiling {args.ceiling:g}"
        )
    check_writable("--json", args.json)
    work = Workload(args.input_len, args.output_len, args.start, args.floor, args.ceiling, args.seconds)
    goals = Objectives(args.ttft, args.itl)
    cancel = Cancel()
    cancel.catch_signals()
    with state_folder(args.state_dir, "kvferry-goodput-") as state:
        results: list[ModeResult] = []
        try:
            for result in search_modes(setup, args.modes, rules, work, goals, load, state, say, cancel):
                results.append(result)
        except Stopped:
            if results:
                print(table(results), flush=True)
            say("stopped")
            drop(args.state_dir, state)
            return 130
        except ConfigError:
            drop(args.state_dir, state)
            raise
        print(table(results), flush=True)
        if args.json:
            write_json(args.json, facts_of(results, setup.facts(), rules.facts(), work, goals, load.name))
        void = [result for result in results if result.void]
        for result in void:
            say(f"kvferry: error: {result.void}")
        if void:
            if not setup.router:
                say(f"logs and stories: {state}")
            return 1
        drop(args.state_dir, state)
    return 0


def facts_of(
    results: Sequence[ModeResult],
    setup: dict[str, Any],
    rules: dict[str, Any],
    work: Workload,
    goals: Objectives,
    load: str,
) -> dict[str, Any]:
    return {
        "objectives": {"ttft_ms": goals.ttft_ms, "itl_ms": goals.itl_ms, "share": SHARE},
        "workload": dataclasses.asdict(work),
        "results": [
            {"input_len": work.input_len, "output_len": work.output_len, **result.facts(), "probes": result.probes}
            for result in results
        ],
        "settings": {**setup, **rules, "load": load},
        "environment": environment(),
    }


def table(results: Sequence[ModeResult]) -> str:
    rows = [("mode", "goodput /s", "at rate", "within", "n", "TTFT p99 ms", "ITL p99 ms", "")]
    for result in results:
        best = result.best()
        if best is None:
            rows.append((result.mode, "void" if result.void else "0", "-", "-", "-", "-", "-", result.limit))
            continue
        rows.append(
            (
                result.mode,
                f"{best['goodput_rps']:.2f}",
                f"{best['qps']:.3g}",
                f"{best['share_within']:.1%}",
                str(best["num"]),
                f"{best['ttft_ms']['p99']:.1f}",
                f"{best['tpot_ms']['p99']:.2f}",
                result.limit,
            )
        )
    return aligned(rows)
