"""`kvferry bench plot`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.bench import captions, figures
from kvferry.bench.arguments import above_zero
from kvferry.bench.environment import environment
from kvferry.bench.series import METRICS, load
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.timeline import first_times
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
    ours = load(args.results).ours() if args.results is not None else []
    if args.story_dir:
        by_id = _stories(args.story_dir)
    elif ours:
        by_id = {story[0]["transfer_id"]: story for entry in ours if (story := entry.get("story"))}
    else:
        hint = "DIR/story of --state-dir DIR, or story_dir; or the --results of a sweep"
        raise ConfigError("--story-dir: needed for --metric timeline", hint=hint)
    chosen = args.transfer or _median(by_id)
    if chosen not in by_id:
        raise ConfigError(f"no story of transfer {chosen!r} in {', '.join(map(str, args.story_dir or [args.results]))}")
    story = sorted(by_id[chosen], key=lambda line: float(line["t"]))
    run = next((entry for entry in ours if chosen in entry.get("transfer_ids", ())), None)
    # A story alone does not say where it happened: most often here.
    told = captions.run(run) if run else f"drawn {captions.hardware(environment())}"
    return figures.timeline(story, f"{captions.transfer(story)}; {told}")


def _stories(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Lines by transfer id."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        hint = "DIR/story of --state-dir DIR, or the engines' and the router's story_dir"
        if not folder.is_dir():
            raise ConfigError(f"--story-dir: {folder} is no folder", hint=hint)
        try:
            for line in read_lines(folder):
                by_id.setdefault(line["transfer_id"], []).append(line)
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"--story-dir: {folder} has files that are no stories", hint=hint) from None
    return by_id


def _median(by_id: dict[str, list[dict[str, Any]]]) -> str:
    """The transfer whose first token took the median time."""
    took = []
    for transfer_id, lines in by_id.items():
        times = first_times(lines)
        if {"received", "first_token", "posted"} <= times.keys():
            took.append((times["first_token"] - times["received"], transfer_id))
    if not took:
        raise ConfigError("the stories hold no transfer with a first token", hint="router and engines must both tell")
    return sorted(took)[len(took) // 2][1]
