"""`kvferry demo`: one real model served colocated, pulled and pushed; the same questions, the answers side by side."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from kvferry.launch.cancel import Cancel, Stopped, interruptible
from kvferry.launch.commands import add_state_dir, say, show_tail
from kvferry.launch.deployment import Deployment
from kvferry.launch.process import ProcessDied
from kvferry.launch.spec import MODES, DeploymentSpec, mode_named
from kvferry.launch.timeline import LABELS, LEGEND, PULL_LABELS, STREAM_LABELS, STREAM_LEGEND, bars
from kvferry.launch.web import open_json
from kvferry.story import read_story

_PASSAGE = (
    "A ferry carries people and goods across a river where no bridge was built. Two towns lie on the two banks. In the "
    "morning the boat takes bread, milk and letters from the east bank to the west bank; in the evening it brings "
    "back fish, wool and the children who go to school there. When the river is high, the ferryman waits, and both "
    "towns learn how much they depend on him. One year the towns collected money for a bridge, but the engineers "
    "found that the ground was too soft on the western side. So they bought a second boat instead, and now one boat "
    "leaves as the other arrives, and nobody waits longer than it takes to drink a cup of tea."
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three things that float on water.",
    f"Read this and say in one sentence what the towns did: {_PASSAGE}",
)


@dataclass(frozen=True)
class Answer:
    text: str
    ttft_ms: float
    total_ms: float
    transfer_id: str


def ask(url: str, model: str, question: str, max_tokens: int, timeout_s: float = 180.0) -> Answer:
    """One streamed, greedy chat completion."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
    }
    begun = time.monotonic()
    first = 0.0
    parts: list[str] = []
    with open_json(f"{url}/v1/chat/completions", body, timeout_s) as answer:
        transfer_id = (answer.headers.get("x-kvferry-transfer-id") or "").split(",")[0]
        for raw in answer:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    first = first or time.monotonic()
                    parts.append(piece)
    ended = time.monotonic()
    return Answer("".join(parts), ((first or ended) - begun) * 1e3, (ended - begun) * 1e3, transfer_id)


def side_by_side(titles: Sequence[str], texts: Sequence[str], width: int) -> list[str]:
    """Columns of wrapped text under their titles."""
    each = max(20, (width - 3 * (len(texts) - 1)) // len(texts))
    columns = [[title, "-" * each, *textwrap.wrap(text, each)] for title, text in zip(titles, texts, strict=True)]
    return [" | ".join(f"{cell:<{each}}" for cell in row).rstrip() for row in zip_longest(*columns, fillvalue="")]


def differences(answers: dict[str, list[Answer]]) -> list[str]:
    """One line for each answer that is not the first mode's, with the place where it leaves it."""
    lines = []
    base, *others = answers
    for mode in others:
        for number, (ours, theirs) in enumerate(zip(answers[base], answers[mode], strict=True), 1):
            if ours.text != theirs.text:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours.text, theirs.text, strict=False)) if a != b),
                    min(len(ours.text), len(theirs.text)),
                )
                lines.append(f"question {number}: {mode} differs from {base} from character {at} on")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="colocated,pull,push", help="the first is the one to compare with")
    parser.add_argument("--model", default="smollm2", help="smollm2, or the folder of a model")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32 (default), in which the same tokens come out however the prompt was cut; bfloat16 may differ",
    )
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="length of each answer (default: 48)")
    add_state_dir(parser)


def _serve_and_ask(args: argparse.Namespace, mode: str, cancel: Cancel) -> tuple[list[Answer], list[str]]:
    """The answers under one mode, and the timeline of the last question. One deployment at a time: few cores."""
    say(f"== {mode}: starting")
    spec = DeploymentSpec(mode=mode, model=args.model, dtype=args.dtype, state_dir=args.state_dir / f"demo-{mode}")
    with Deployment(spec, report=lambda line: say(f"   {line}"), cancel=cancel) as deployment:
        name = deployment.model_name()
        ask_one = partial(ask, deployment.router_url, name, max_tokens=args.max_tokens)
        answers = [interruptible(cancel, partial(ask_one, question)) for question in QUESTIONS]
        say(f"== {mode}: answered")
    story = read_story(deployment.state_dir.story, answers[-1].transfer_id)
    labels = {"pull": PULL_LABELS, "stream": STREAM_LABELS}.get(mode_named(mode).router_mode, LABELS)
    return answers, bars(story, labels)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if all answers are the same in every mode."""
    modes = [mode_named(name.strip()).name for name in args.modes.split(",")]
    args.state_dir = Path(args.state_dir)
    cancel = Cancel()
    cancel.catch_signals()
    answers: dict[str, list[Answer]] = {}
    timelines: dict[str, list[str]] = {}
    try:
        for mode in modes:
            answers[mode], timelines[mode] = _serve_and_ask(args, mode, cancel)
    except Stopped:
        say("stopped")
        return 130
    except ProcessDied as error:
        show_tail(error)
        raise
    _print_report(args, answers, timelines)
    return 1 if differences(answers) else 0


def _print_report(args: argparse.Namespace, answers: dict[str, list[Answer]], timelines: dict[str, list[str]]) -> None:
    width = max(80, min(160, shutil.get_terminal_size((120, 24)).columns))
    out = []
    for number, question in enumerate(QUESTIONS):
        out += ["", f"Question {number + 1}: {textwrap.shorten(question, width - 14)}", ""]
        out += side_by_side(list(answers), [given[number].text for given in answers.values()], width)
        times = [f"first token {a[number].ttft_ms:.0f} ms, all {a[number].total_ms:.0f} ms" for a in answers.values()]
        out += side_by_side([""] * len(times), times, width)[2:]
    for mode, lines in timelines.items():
        if MODES[mode].connector == "kvferry":
            transfer = answers[mode][-1].transfer_id
            folder = args.state_dir / f"demo-{mode}"
            out += ["", f"Question {len(QUESTIONS)} with {mode}, transfer {transfer}", *lines]
            out += [f"  every event: kvferry story {transfer} --state-dir {folder}"]
    if any(MODES[mode].connector == "kvferry" for mode in timelines):
        out += ["", *LEGEND, *(STREAM_LEGEND if "stream" in timelines else ())]
    if any(MODES[mode].split for mode in timelines):
        out += [
            "",
            "On two cores shared by all processes, the split modes' first token is not expected to beat one engine for "
            "a single request.",
        ]
    different = differences(answers)
    out += ["", *different]
    if len(answers) > 1:
        same = f"identical: all {len(QUESTIONS)} answers are the same in {', '.join(answers)}"
        out += [f"NOT identical: {len(different)} answers differ" if different else same]
    print("\n".join(out))
    sys.stdout.flush()
