"""`kvferry bench plot`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.bench import figures
from kvferry.bench.arguments import above_zero
from kvferry.bench.environment import environment
from kvferry.bench.series import METRICS, load
from kvferry.errors import ConfigError, unknown_name
from kvferry.story import read_lines

FIGURES = (*METRICS, "goodput", "timeline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--metric", required=True, metavar="M", help=f"one of: {', '.join(FIGURES)}")
    add("--out", type=Path, required=True, metavar="F", help="file to write, .png or .svg")
    add("--results", type=Path, metavar="DIR", help="folder of a sweep")
    add("--panels", choices=("input", "qps"), default="input", help="one per input length or per rate (default: input)")
    add("--output-len", type=int, metavar="L", help="where the sweep has several")
    add("--ttft", type=above_zero, metavar="MS", help="objective of --metric goodput")
    add("--itl", type=above_zero, metavar="MS", help="objective of --metric goodput")
    add("--story-dir", type=Path, action="append", default=[], metavar="DIR", help="of --metric timeline; repeatable")
    add(
        "--transfer",
        metavar="ID",
        help="of --metric timeline (default: the transfer with the median time to its token)",
    )


def run(args: argparse.Namespace) -> int:
    if args.metric not in FIGURES:
        raise unknown_name("metric", args.metric, FIGURES)
    if args.out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out: {args.out} is neither .png nor .svg", hint="name the file one or the other")
    if args.metric == "timeline":
        figure = _timeline(args)
    else:
        if args.results is None:
            raise ConfigError("--results: needed", hint="the folder that `kvferry bench sweep` wrote to")
        goals = (args.ttft, args.itl) if args.ttft and args.itl else None
        if args.metric == "goodput" and goals is None:
            raise ConfigError("--metric goodput needs --ttft and --itl", hint="the objectives, in milliseconds")
        figure = figures.panels(load(args.results), args.metric, args.panels, goals, args.output_len)
    figures.save(figure, args.out)
    print(args.out)
    return 0


def _timeline(args: argparse.Namespace) -> object:
    if not args.story_dir:
        raise ConfigError(
            "--story-dir: needed for --metric timeline", hint="DIR/story of --state-dir DIR, or story_dir"
        )
    by_id: dict[str, list[dict[str, object]]] = {}
    for folder in args.story_dir:
        for line in read_lines(folder) if folder.is_dir() else []:
            by_id.setdefault(line["transfer_id"], []).append(line)
    chosen = args.transfer or _median(by_id)
    if chosen not in by_id:
        raise ConfigError(f"no story of transfer {chosen!r} in {', '.join(map(str, args.story_dir))}")
    story = sorted(by_id[chosen], key=lambda line: float(str(line["t"])))
    posts = [line for line in story if line["event"] == "posted"]
    nbytes = sum(int(str(line["nbytes"])) for line in posts)
    pieces = sum(int(str(line["descriptors"])) for line in posts)
    mode = next((line["mode"] for line in story if line["event"] == "dispatched"), "unknown")
    parts = [f"transfer {chosen}, mode {mode}", f"{nbytes / 1e6:.1f} MB in {pieces} descriptors"]
    if args.results is not None:
        ours = [entry for entry in load(args.results).ours() if chosen in entry.get("transfer_ids", ())]
        if ours:
            point, settings = ours[0]["point"], ours[0]["settings"]
            parts.append(f"{point['input_len']} prompt tokens, {point['output_len']} out, {point['qps']:g} requests/s")
            parts.append(figures.what(settings))
    parts.append(figures.hardware(environment()))
    return figures.timeline(story, "; ".join(parts))


def _median(by_id: dict[str, list[dict[str, object]]]) -> str:
    """The transfer whose first token took the median time."""
    took = []
    for transfer_id, lines in by_id.items():
        times = {str(line["event"]): float(str(line["t"])) for line in lines}
        if {"received", "first_token", "posted"} <= times.keys():
            took.append((times["first_token"] - times["received"], transfer_id))
    if not took:
        raise ConfigError("the stories hold no transfer with a first token", hint="router and engines must both tell")
    return sorted(took)[len(took) // 2][1]
