"""A run as JSON, as a table in the terminal, and as markdown: the same facts three times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.bench.compare import Run, Settings
from kvferry.bench.environment import environment
from kvferry.bench.points import writing
from kvferry.bench.records import Batch, result
from kvferry.bench.verdict import hook_verdicts, ratios
from kvferry.launch import engine as engines

Row = Sequence[str]


def facts_of(settings: Settings, run: Run) -> dict[str, Any]:
    """`results` holds the tuned modes, each once per prompt length; what ran as vLLM ships it is beside them."""
    groups: dict[tuple[bool, str, int], list[Batch]] = {}
    for batch in run.batches:
        groups.setdefault((batch.variant.tuned, batch.variant.mode, batch.input_len), []).append(batch)

    def entries(tuned: bool, modes: Sequence[str]) -> list[dict[str, Any]]:
        keys = [(tuned, mode, length) for mode in modes for length in settings.input_lens]
        return [
            result(groups[key], settings.output_tokens, settings.qps, run.kv_bytes) for key in keys if key in groups
        ]

    results = entries(True, settings.modes)
    return {
        "results": results,
        "as_shipped": entries(False, settings.as_shipped),
        "as_shipped_failures": run.failures,
        "ratios": ratios(results, settings.seed),
        "hooks": hook_verdicts(results),
        "same_text": same_text(results),
        "slices": run.slices,
        "environment": {
            **environment(),
            "seed": settings.seed,
            "settings": dataclasses.asdict(settings),
            "vllm_args": settings.engine_args(),
            "engine_env": {**engines.CPU_ENV, **engines.CPU_TUNED_ENV} if not engines.gpus() else {},
            "upstream_env": engines.UPSTREAM_TUNED_ENV,
            "kv_bytes_per_token": run.kv_bytes,
        },
    }


def same_text(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many answers of each mode are those of the first mode, word by word, prompt by prompt. For information: in
    bfloat16 a greedy answer may fork where two logits are equal but for rounding.
    """
    found = []
    for length in sorted({entry["input_len"] for entry in results}):
        same_length = [entry for entry in results if entry["input_len"] == length]
        reference = {sample["index"]: sample["text"] for sample in same_length[0]["samples"]}
        for entry in same_length[1:]:
            equal = sum(reference.get(sample["index"]) == sample["text"] for sample in entry["samples"])
            found.append(
                {
                    "mode": entry["mode"],
                    "as": same_length[0]["mode"],
                    "input_len": length,
                    "equal": equal,
                    "of": entry["num"],
                }
            )
    return found


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Raises `ConfigError` where it can't be written."""
    with writing(path):
        path.write_text(json.dumps(facts, indent=1) + "\n")


def text(facts: dict[str, Any]) -> str:
    parts = [aligned(_result_rows(facts)), aligned(_verdict_rows(facts))]
    return "\n\n".join(part for part in [*parts, "\n".join(_notes(facts))] if part)


def markdown(facts: dict[str, Any]) -> str:
    about, settings = facts["environment"], facts["environment"]["settings"]
    sim = settings["engine"] == "sim"
    served = f"modelled engine, profile {settings['profile']}" if sim else f"model {settings['model']}"
    head = (
        f"{about['date']}: {about['cores']} cores of {about['cpu_model']}, {about['memory_gib']} GiB, vLLM "
        f"{about['vllm']}, torch {about['torch']}, nixl {about['nixl']}, kvferry {about['kvferry']}, Python "
        f"{about['python']}, {served}, seed {about['seed']}, load average before "
        f"{facts['slices'][0]['loadavg_1m_before']}."
    )
    tables = [_piped(_result_rows(facts)), _piped(_verdict_rows(facts))]
    notes = "\n".join(f"- {note}" for note in _notes(facts))
    return "\n\n".join(part for part in [head, *tables, notes] if part) + "\n"


def _result_rows(facts: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [
        ("mode", "input", "n", "TTFT p50", "p90", "first", "TPOT p50", "ITL p99", "E2E p50", "moved", "expected")
    ]
    for entry in [*facts["results"], *facts["as_shipped"]]:
        rows.append(
            (
                entry["mode"] if entry["tuned"] else f"{entry['mode']} (as shipped)",
                str(entry["input_len"]),
                str(entry["num"]),
                _ms(entry["ttft_ms"]["p50"]),
                _ms(entry["ttft_ms"]["p90"]),
                _ms(entry["first_ttft_ms"]["p50"]),
                _ms(entry["tpot_ms"]["p50"]),
                _ms(entry["itl_ms"]["p99"]),
                _ms(entry["e2e_ms"]["p50"]),
                _mib(entry["moved_bytes"]),
                _mib(entry["expected_bytes"]),
            )
        )
    return rows


def _verdict_rows(facts: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [("ratio of medians", "input", "measured", "95% interval", "bound", "")]
    for line in facts["ratios"]:
        metric = line["metric"].removesuffix("_ms").upper()
        interval = f"{line['low']:.3f} to {line['high']:.3f}"
        name = f"{metric} {line['name']}"
        measured = f"{line['value']:.3f}" + (f" (worst {line['worst']:.3f})" if "worst" in line else "")
        rows.append((name, str(line["input_len"]), measured, interval, f"<= {line['bound']:g}", _mark(line)))
    for line in facts["hooks"]:
        measured, bound = f"{line['value']:.3f} ms", f"< {line['bound']:g} ms"
        rows.append((line["name"], str(line["input_len"]), measured, "", bound, _mark(line)))
    return rows if len(rows) > 1 else []


def _mark(line: dict[str, Any]) -> str:
    return {True: "met", False: "NOT MET", None: f"not judged: {line['why']}"}[line["met"]]


def _notes(facts: dict[str, Any]) -> list[str]:
    notes = ["times in ms, moved and expected in MiB; `first`: median of the first requests after each start"]
    for line in facts["same_text"]:
        whose = f"{line['mode']}, {line['input_len']} tokens"
        notes.append(f"{whose}: {line['equal']} of {line['of']} answers are those of {line['as']}")
    for line in facts["as_shipped_failures"]:
        notes.append(f"{line['mode']} as shipped, start {line['attempt']} failed: {line['reason']}")
    if not facts["environment"]["settings"]["warm_up"]:
        notes.append("without the launcher's warm-up requests")
    busy = facts["slices"][0]["loadavg_1m_before"]
    if busy > 0.5:
        notes.append(f"the machine was not quiet at the start: load average {busy}")
    return notes


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"


def aligned(rows: Sequence[Row]) -> str:
    """The first column to the left, the others to the right, the last one as it is."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        if not rows[0][-1]:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _piped(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
