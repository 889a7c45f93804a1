"""One transfer's story as lines (`kvferry story`) and as bars in the terminal (the demo)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.launch.chunks import FIXED, gathered, streamed
from kvferry.launch.commands import add_state_dir
from kvferry.launch.state import StateDir
from kvferry.story import STEPS, read_story

_LAST = {"written", "rewound"}
"""Events of a stream that happen several times, and whose last time counts."""

PULL_LABELS = tuple(step[0] for step in STEPS)
"""Every label that there is; a pull needs them all but for those of streams."""
_OF_STREAMS = {"rewound", "bound", "chunks"}
_AT_TIMES = {"rewound", "bound"}
LABELS = tuple(label for label in PULL_LABELS if label not in {"prefill reply", "granted", *_OF_STREAMS})
"""Of a push, where D is asked together with P and nothing is granted."""
STREAM_LABELS = tuple(label for label in PULL_LABELS if label not in ("prefill reply", "granted", "posted"))
LEGEND = (
    "  P: prefill engine, D: decode engine. at: the step's end, since the request came; took: since what it waited for",
    "  matched: P has the KV and knows D's blocks; posted: the copy was handed to the network (moved: its size)",
    "  →: goes on after the first token, with which the axis ends",
)
STREAM_LEGEND = (
    "  of a stream: chunks, from the first handed to the network to the last written; landed, since prefill was done, "
    "which is what was not hidden behind it",
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
    """What all ranks posted; of a stream, how much of it before prefill was done."""
    posts = [line for line in story if line["event"] == "posted" and "nbytes" in line]
    if not posts:
        return ""
    nbytes, descriptors = (sum(line.get(key, 0) for line in posts) for key in ("nbytes", "descriptors"))
    moved = f", moved {nbytes / 1e6:.1f} MB in {descriptors} descriptors"
    if not streamed(story):
        return moved
    done = first_times(story).get("computed", float("inf"))
    early = sum(line["nbytes"] for line in posts if float(line["t"]) < done)
    many = f"{len(posts)} chunk{'s' * (len(posts) > 1)}"
    return f"{moved} and {many}, {100 * early / max(nbytes, 1):.0f}% before prefill was done"


def story_lines(story: Sequence[dict[str, Any]], every: bool = False) -> list[str]:
    """Every event of a transfer with its distance from the first and from the one before, in milliseconds.

    The chunks that one rank of a stream posted, or saw written, between two other events share a line, which stands
    where the first of them was; `every`: each has its own.
    """
    lines = []
    begun = before = float(story[0]["t"])
    for line in story if every or not streamed(story) else gathered(story):
        t = float(line["t"])
        facts = " ".join(f"{key}={value}" for key, value in line.items() if key not in FIXED and value != "")
        who = line["side"] if not line.get("rank") else f"{line['side']}/{line['rank']}"
        text = f"{(t - begun) * 1e3:>10.1f} ms  +{(t - before) * 1e3:>8.1f}  {who:<10} {line['event']:<12} {facts}"
        lines.append(text.rstrip())
        before = t
    return lines


def spans(story: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[tuple[str, str, float, float]]:
    """(label, event that ends it, begin, end) of each step of `labels` that the story has; wall-clock seconds.

    Of a stream, `chunks` goes from the first post to the last WRITE's end, in place of `posted`; `rewound` to the last
    time that prefill had to begin anew.
    """
    times, streams = first_times(story), streamed(story)
    if streams:
        times |= {line["event"]: float(line["t"]) for line in story if line["event"] in _LAST}
    found = []
    for label, end_event, start_events in STEPS:
        if label in labels and end_event in times and label != ("posted" if streams else "chunks"):
            end = times[end_event]
            starts = [times[event] for event in start_events if event in times and times[event] <= end]
            found.append((label, end_event, max(starts, default=min(times.values())), end))
    return found


def bars(story: Sequence[dict[str, Any]], labels: Sequence[str] = LABELS, width: int = 60) -> list[str]:
    """One bar per step of `labels` on a common time axis that ends with the first token, where there is one; what goes
    on after it ends in an arrow. The last line names the steps that are missing.
    """
    times, steps = first_times(story), spans(story, labels)
    not_missed = _AT_TIMES | ({"posted"} if streamed(story) else _OF_STREAMS) | {step[0] for step in steps}
    if any(line["event"] == "posted" and line.get("op") == "WRITE" for line in story):
        not_missed.add("granted")
    missing = [label for label in labels if label not in not_missed]
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
            moved = _moved(story) if label in ("posted", "chunks") else ""
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
    parser.add_argument("--every", action="store_true", help="of a stream: a line for each chunk")
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
        print("\n".join(story_lines(sorted(story, key=lambda line: float(line["t"])), args.every)))
    if untold:
        raise ConfigError(
            f"no story of transfer {', '.join(map(repr, untold))} in {', '.join(map(str, folders))}",
            hint="stories are off unless `story_dir` is set in kv_connector_extra_config and --story-dir is given to "
            "the router; other folders: --story-dir or --state-dir",
        )
    return 0
