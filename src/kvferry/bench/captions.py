"""What stands under a figure, and in a report: what was measured, with how many requests, on what."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.bench.points import OURS
from kvferry.bench.series import Results


def caption(results: Results, output_len: int) -> str:
    """Hardware, model or profile, lengths, count, seed: what a reader must know to judge the figure."""
    shown = [entry for entry in results.series if entry.output_len == output_len]
    lengths = sorted({entry.input_len for entry in shown})
    many = "/".join(map(str, sorted({len(entry.ttft) for entry in shown})))
    text = f"prompts of {', '.join(map(str, lengths))} tokens, {output_len} out, {many} requests per point"
    refused = sum(void.point.output_len == output_len for void in results.void)
    text += f", runs refused: {refused}" if refused else ""
    ours = results.ours()
    if not ours:
        return text
    settings = ours[0]["settings"]
    untold = sum(OURS not in file for entry in shown for file in entry.files)
    text += f" ({untold} files do not tell how they were made)" if untold else ""
    return f"{what(settings)}; {text}; seed {settings.get('seed')}; {where(ours)}; load {settings.get('load')}"


def transfer(story: Sequence[dict[str, Any]]) -> str:
    """Which one, in which mode, how much was moved."""
    posts = [line for line in story if line["event"] == "posted"]
    nbytes, pieces = (sum(int(line.get(key, 0)) for line in posts) for key in ("nbytes", "descriptors"))
    mode = next((line["mode"] for line in story if line["event"] == "dispatched" and "mode" in line), "unknown")
    moved = f"{nbytes / 1e6:.1f} MB in {pieces} descriptors"
    return f"transfer {story[0]['transfer_id']}, mode {mode}; {moved}"


def run(ours: dict[str, Any]) -> str:
    """The run that a transfer was of."""
    point, settings = ours["point"], ours["settings"]
    load = f"{point['input_len']} prompt tokens, {point['output_len']} out, {point['qps']:g} requests/s"
    many = f"one of {settings.get('num')} requests; seed {settings.get('seed')}"
    return f"{load}, {many}; {what(settings)}; {where([ours])}"


def what(settings: dict[str, Any]) -> str:
    """The served model, and whether it computes; what its engines were told beside."""
    more = " ".join(map(str, settings.get("engine_args") or ()))
    if settings.get("router"):
        model = f"{settings.get('profile')} (modelled)" if settings.get("engine") == "sim" else _model(settings)
        return f"engines behind a router, {model}"
    if settings.get("engine") == "sim":
        return f"modelled engine, profile {settings.get('profile')}, real transfers" + (f", {more}" if more else "")
    return _model(settings) + (f", {more}" if more else "")


def _model(settings: dict[str, Any]) -> str:
    return f"model {Path(str(settings.get('model', '?'))).name}"


def where(ours: Sequence[dict[str, Any]]) -> str:
    """The machines of these runs. Of engines behind a router only the load generator's is known."""
    machines = list(dict.fromkeys(hardware(entry["environment"]) for entry in ours))
    behind = any(entry["settings"].get("router") for entry in ours)
    return f"load generator {' and '.join(machines)}" if behind else " and ".join(machines)


def hardware(about: dict[str, Any]) -> str:
    gpus = f", {about['gpus']}" if about.get("gpus") else ""
    cores, cpu, memory = (about.get(name, "?") for name in ("cores", "cpu_model", "memory_gib"))
    return f"on {cores} cores of {cpu}, {memory} GiB{gpus}"


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))
