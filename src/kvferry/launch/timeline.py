"""One transfer's story as lines (`kvferry story`) and as bars in the terminal (the demo)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.launch.commands import add_state_dir
from kvferry.launch.state import StateDir
from kvferry.story import read_story

_FIXED = {"t", "transfer_id", "side", "rank", "event"}

# Label, the event that ends the step, the events that may begin it: the latest of those that came before the end.
STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dispatched", "dispatched", ("received",)),
    ("queued", "queued", ("received", "dispatched")),
    ("prefill", "computed", ("queued",)),
    ("prefill reply", "prefill_done", ("computed",)),
    ("allocated", "allocated", ("dispatched", "prefill_done")),
    ("registered", "registered", ("dispatched", "prefill_done", "allocated")),
    ("matched", "matched", ("registered", "computed")),
    ("granted", "granted", ("matched",)),
    ("posted", "posted", ("matched", "granted")),
    ("landed", "landed", ("posted",)),
    ("first token", "first_token", ("landed",)),
    ("last token", "last_token", ("first_token",)),
)
PULL_LABELS = tuple(step[0] for step in STEPS)
LABELS = tuple(label for label in PULL_LABELS if label not in ("prefill reply", "granted"))
"""Of a push, where D is asked together with P and nothing is granted."""
LEGEND = (
    "  P: prefill engine, D: decode engine. at: the step's end, since the request came; took: since what it waited for",
    "  matched: P has the KV and knows D's blocks; posted: the copy was handed to the network (moved: its size)",
    "  →: goes on after the first token, with which the axis ends",
)
_WHO = {"prefill": "P", "decode": "D"}


def first_times(story: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Event -> the time it first happened."""
    times: dict[str, float] = {}
    for line in story:
        times.setdefault(line["event"], float(line["t"]))
    return times


def actor(story: Sequence[dict[str, Any]], event: str) -> str:
    """Who acts: the side that told of the event, but the router only sees the tokens that D makes."""
    side = next(line["side"] for line in story if line["event"] == event)
    return "D" if event in ("first_token", "last_token") else _WHO.get(side, side)


def _moved(story: Sequence[dict[str, Any]]) -> str:
    """What all ranks posted."""
    posts = [line for line in story if line["event"] == "posted" and "nbytes" in line]
    if not posts:
        return ""
    nbytes, descriptors = (sum(line.get(key, 0) for line in posts) for key in ("nbytes", "descriptors"))
    return f", moved {nbytes / 1e6:.1f} MB in {descriptors} descriptors"


def story_lines(story: Sequence[dict[str, Any]]) -> list[str]:
    """Every event of a transfer with its distance from the first and from the one before, in milliseconds."""
    lines = []
    begun = before = float(story[0]["t"])
    for line in story:
        t = float(line["t"])
        facts = " ".join(f"{key}={value}" for key, value in line.items() if key not in _FIXED and value != "")
        who = line["side"] if not line.get("rank") else f"{line['side']}/{line['rank']}"
        text = f"{(t - begun) * 1e3:>10.1f} ms  +{(t - before) * 1e3:>8.1f}  {who:<10} {line['event']:<12} {facts}"
        lines.append(text.rstrip())
        before = t
    return lines


def spans(story: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[tuple[str, str, float, float]]:
    """(label, event that ends it, begin, end) of each step of `labels` that the story has; wall-clock seconds."""
    times = first_times(story)
    found = []
    for label, end_event, start_events in STEPS:
        if label in labels and end_event in times:
            end = times[end_event]
            starts = [times[event] for event in start_events if event in times and times[event] <= end]
            found.append((label, end_event, max(starts, default=min(times.values())), end))
    return found


def bars(story: Sequence[dict[str, Any]], labels: Sequence[str] = LABELS, width: int = 60) -> list[str]:
    """One bar per step of `labels` on a common time axis that ends with the first token, where there is one; what goes
    on after it ends in an arrow. The last line names the steps that are missing.
    """
    times, steps = first_times(story), spans(story, labels)
    missing = [label for label in labels if label not in {step[0] for step in steps}]
    lines = []
    if steps:
        begun = min(times.values())
        axis_end = times.get("first_token", max(step[3] for step in steps))
        scale = width / max(axis_end - begun, 1e-9)
        for label, event, start, end in sorted(steps, key=lambda step: (step[3], step[2])):
            left = min(width - 1, round((start - begun) * scale))
            length = round((end - begun) * scale) - left
            bar = " " * left + ("█" * length if length > 0 else "▏")
            bar = bar if len(bar) <= width else bar[: width - 1] + "→"
            at, took = (end - begun) * 1e3, (end - start) * 1e3
            moved = _moved(story) if event == "posted" else ""
            who = actor(story, event)
            lines.append(f"  {who:<6} {label:<13} |{bar:<{width}}| at {at:>8.1f} ms  took {took:.1f}{moved}")
    if missing:
        lines.append(f"  not in the story: {', '.join(missing)}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("transfer_id", help="from the answer's header x-kvferry-transfer-id, or a log; several: a,b")
    parser.add_argument(
        "--story-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder with stories (default: STATE_DIR/story); repeat it for files collected from several hosts",
    )
    add_state_dir(parser)


def run(args: argparse.Namespace) -> int:
    folders: list[Path] = args.story_dir or [StateDir(args.state_dir).story]
    ids = [part.strip() for part in args.transfer_id.split(",") if part.strip()]
    untold = [] if ids else [args.transfer_id]
    for transfer_id in ids:
        story = [line for folder in folders if folder.is_dir() for line in read_story(folder, transfer_id)]
        if not story:
            untold.append(transfer_id)
            continue
        if len(ids) > 1:
            print(f"transfer {transfer_id}")
        print("\n".join(story_lines(sorted(story, key=lambda line: float(line["t"])))))
    if untold:
        raise ConfigError(
            f"no story of transfer {', '.join(map(repr, untold))} in {', '.join(map(str, folders))}",
            hint="stories are off unless `story_dir` is set in kv_connector_extra_config and --story-dir is given to "
            "the router; other folders: --story-dir or --state-dir",
        )
    return 0
