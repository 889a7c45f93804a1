"""One transfer's story as lines and as bars in the terminal."""

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

# A label and the (side, event) at which the bar of that label ends.
STEPS = (
    ("received", ("router", "received")),
    ("queued", ("prefill", "queued")),
    ("registered", ("decode", "registered")),
    ("prefill", ("prefill", "computed")),
    ("matched", ("prefill", "matched")),
    ("posted", ("prefill", "posted")),
    ("granted", ("decode", "granted")),
    ("landed", ("decode", "landed")),
    ("first token", ("router", "first_token")),
    ("last token", ("router", "last_token")),
)


def first_times(story: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """(side, event) -> the time it first happened."""
    times: dict[tuple[str, str], float] = {}
    for line in story:
        times.setdefault((line["side"], line["event"]), float(line["t"]))
    return times


def story_lines(story: Sequence[dict[str, Any]]) -> list[str]:
    """Every event of a transfer with its distance from the first and from the one before, in milliseconds."""
    lines = []
    begun = before = float(story[0]["t"])
    for line in story:
        t = float(line["t"])
        facts = " ".join(f"{key}={value}" for key, value in line.items() if key not in _FIXED)
        who = line["side"] if not line.get("rank") else f"{line['side']}/{line['rank']}"
        text = f"{(t - begun) * 1e3:>10.1f} ms  +{(t - before) * 1e3:>8.1f}  {who:<10} {line['event']:<12} {facts}"
        lines.append(text.rstrip())
        before = t
    return lines


def bars(story: Sequence[dict[str, Any]], needed: Sequence[str], width: int = 56) -> list[str]:
    """A bar per step, from the step before to its own event, in order of time. Says which of `needed` are missing."""
    times = first_times(story)
    steps = sorted((times[event], label) for label, event in STEPS if event in times)
    if not steps:
        return ["  no events"]
    begun, ended = steps[0][0], steps[-1][0]
    scale = width / max(ended - begun, 1e-9)
    lines = []
    before = begun
    for t, label in steps:
        left = round((before - begun) * scale)
        right = round((t - begun) * scale)
        bar = " " * left + "█" * (right - left)
        bar = bar if right > left else " " * min(left, width - 1) + "▏"
        lines.append(f"  {label:<12}|{bar:<{width}}| {(t - begun) * 1e3:>8.1f} ms  (+{(t - before) * 1e3:.1f})")
        before = t
    present = {label for _, label in steps}
    missing = [label for label in needed if label not in present]
    if missing:
        lines.append(f"  not in the story: {', '.join(missing)}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("transfer_id", help="as the router's answers and logs name it")
    add_state_dir(parser)


def run(args: argparse.Namespace) -> int:
    folder = StateDir(args.state_dir).story
    story = read_story(folder, args.transfer_id) if Path(folder).is_dir() else []
    if not story:
        raise ConfigError(f"no story of transfer {args.transfer_id!r} in {folder}", hint="see --state-dir")
    print("\n".join(story_lines(story)))
    return 0
