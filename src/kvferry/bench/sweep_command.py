"""`kvferry bench sweep`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.bench.arguments import lengths, rates
from kvferry.bench.load import AUTO, choose
from kvferry.bench.points import Folder, in_order
from kvferry.bench.setup_arguments import add_load, add_setup, drop, rules_of, setup_of, state_folder
from kvferry.bench.sweep import Sweep
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel, Stopped
from kvferry.launch.commands import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser, "pull,push")
    add = parser.add_argument
    add("--qps", type=rates, required=True, metavar="Q1,Q2", help="requests per second")
    add("--input-lens", type=lengths, required=True, metavar="L1,L2", help="prompt tokens")
    add("--output-lens", type=lengths, default=[128], metavar="L1,L2", help="output tokens (default: 128)")
    add("--iterations", type=int, default=1, metavar="I", help="runs of each point, each with other prompts")
    add("--results", type=Path, required=True, metavar="DIR", help="a file per point; those there are kept")
    add_load(parser, AUTO, 100)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if every point has a valid result, 1 if one was void, 130 if stopped."""
    setup, load = setup_of(args), choose(args.load)
    rules = rules_of(args, load)
    if args.iterations < 1:
        raise ConfigError(f"--iterations: {args.iterations}", hint="expected 1 or more")
    points = in_order(args.modes, args.qps, args.input_lens, args.output_lens, args.iterations)
    cancel = Cancel()
    cancel.catch_signals()
    with state_folder(args.state_dir, "kvferry-sweep-") as state:
        try:
            outcome = Sweep(setup, rules, load, points, Folder(args.results), state).run(say, cancel)
        except Stopped:
            say("stopped; the same command goes on with the points that are missing")
            drop(args.state_dir, state)
            return 130
        except ConfigError:
            drop(args.state_dir, state)
            raise
        print(f"{len(outcome.done)} measured, {len(outcome.skipped)} there already, {len(outcome.void)} void")
        for point, reason in outcome.void:
            say(f"kvferry: error: {point.name} is void: {reason}")
        if outcome.void:
            if not setup.router:
                say(f"logs and stories: {state}")
            return 1
        drop(args.state_dir, state)
    return 0
