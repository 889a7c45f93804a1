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
    ("queued", "queued", ("received", "dispatched")),
    ("prefill", "computed", ("queued",)),
    ("registered", "registered", ("dispatched", "prefill_done", "allocated")),
    ("matched", "matched", ("registered", "computed")),
    ("posted", "posted", ("matched", "granted")),
    ("landed", "landed", ("posted",)),
    ("first token", "first_token", ("landed",)),
    ("last token", "last_token", ("first_token",)),
)
LABELS = tuple(step[0] for step in STEPS)


def first_times(story: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Event -> the time it first happened."""
    times: dict[str, float] = {}
    for line in story:
        times.setdefault(line["event"], float(line["t"]))
    return times


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


def bars(story: Sequence[dict[str, Any]], labels: Sequence[str] = LABELS, width: int = 60) -> list[str]:
    """One bar per step of `labels` on a common time axis that ends with the first token, where there is one; what goes
    on after it ends in an arrow. The last line names the steps that are missing.
    """
    times = first_times(story)
    spans = []
    for label, end_event, start_events in STEPS:
        if label in labels and end_event in times:
            end = times[end_event]
            starts = [times[event] for event in start_events if event in times and times[event] <= end]
            spans.append((label, max(starts, default=min(times.values())), end))
    missing = [label for label in labels if label not in {span[0] for span in spans}]
    lines = []
    if spans:
        begun = min(times.values())
        axis_end = times.get("first_token", max(end for _, _, end in spans))
        scale = width / max(axis_end - begun, 1e-9)
        for label, start, end in sorted(spans, key=lambda span: (span[2], span[1])):
            left = min(width - 1, round((start - begun) * scale))
            length = round((end - begun) * scale) - left
            bar = " " * left + ("█" * length if length > 0 else "▏")
            bar = bar if len(bar) <= width else bar[: width - 1] + "→"
            at, took = (end - begun) * 1e3, (end - start) * 1e3
            lines.append(f"  {label:<11} |{bar:<{width}}| {at:>8.1f} ms  took {took:.1f}")
    if missing:
        lines.append(f"  not in the story: {', '.join(missing)}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("transfer_id", help="from the answer's header x-kvferry-transfer-id, or a log")
    add_state_dir(parser)


def run(args: argparse.Namespace) -> int:
    folder = StateDir(args.state_dir).story
    story = read_story(folder, args.transfer_id) if Path(folder).is_dir() else []
    if not story:
        raise ConfigError(f"no story of transfer {args.transfer_id!r} in {folder}", hint="see --state-dir")
    print("\n".join(story_lines(story)))
    return 0
