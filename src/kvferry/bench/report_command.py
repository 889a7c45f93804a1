"""`kvferry bench report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvferry.bench.arguments import above_zero
from kvferry.bench.points import check_writable, write_whole
from kvferry.bench.report import write_json
from kvferry.bench.report_page import page
from kvferry.bench.ruling import rule
from kvferry.bench.series import load
from kvferry.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", type=Path, required=True, metavar="DIR", help="folder of a sweep; report.html goes there")
    add("--ttft", type=above_zero, metavar="MS", help="objective: with --itl the verdict goes by goodput")
    add("--itl", type=above_zero, metavar="MS", help="objective for a request's mean time between tokens")
    add("--json", type=Path, metavar="F", help="write the points and the verdict")


def run(args: argparse.Namespace) -> int:
    if (args.ttft is None) != (args.itl is None):
        raise ConfigError("--ttft and --itl go together", hint="the objectives, in milliseconds")
    check_writable("--json", args.json)
    goals = None if args.ttft is None else (args.ttft, args.itl)
    results = load(args.results)
    ruling = rule(results.series, goals)
    path = args.results / "report.html"
    write_whole(path, page(results, ruling, goals))
    if args.json:
        void = [{**entry.point.facts(), "reasons": list(entry.reasons)} for entry in results.void]
        verdict = {"mode": ruling.mode, "why": ruling.why, "scores": ruling.scores, "rule": ruling.rule}
        points = [entry.facts() for entry in results.series]
        write_json(args.json, json.loads(json.dumps({"points": points, "void": void, "verdict": verdict})))
    print(f"{ruling.mode or 'no verdict'}: {ruling.why}")
    print(path)
    return 0
