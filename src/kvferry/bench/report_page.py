"""One self-contained HTML page of a sweep: verdict, figures, tables, what was refused, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvferry.bench import captions, figures
from kvferry.bench.judge import LATE_SHARE
from kvferry.bench.ruling import Ruling
from kvferry.bench.series import Results, Series

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #999; } td.l, th.l { text-align: left; }
.verdict { background: #f2f5f8; border-left: 4px solid #1b6ca8; padding: .7em 1em; }
.void { color: #a02020; } svg { max-width: 100%; height: auto; } code { font-size: 92%; }
"""
SIM = (
    "Modelled: the time that a step of the model takes, from the profile's formula; nothing is computed on a GPU. "
    "Real: the HTTP server and the router, scheduling and paged KV memory, the connector, the registration and "
    "hand-over protocol, and every byte of KV, moved by NIXL between processes. A run in which an engine could not "
    "keep its modelled time is refused."
)
ROUTER = (
    "The engines were not started for this: a router that ran already was asked. What is behind it is known only as it "
    "was described; the hardware named here is the load generator's."
)
REAL = (
    "Nothing is modelled: every request went through the router to vLLM engines that computed a real model; in the "
    "split modes the KV was moved by NIXL."
)


def page(results: Results, ruling: Ruling, objectives: tuple[float, float] | None) -> str:
    ours = results.ours()
    settings = ours[0]["settings"] if ours else {}
    parts = [
        "<h1>Prefill and decode: colocated, pull, push</h1>",
        _verdict(ruling, objectives),
        *_figures(results, objectives),
        *_timelines(results),
        "<h2>Points</h2>",
        _points(results.series),
        _transfers(results.series),
        _ruling_table(ruling),
        _refused(results),
        "<h2>How it was measured</h2>",
        *(f"<p>{text}</p>" for text in _method(settings, ours)),
        _environment(ours),
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvferry sweep</title><style>{STYLE}</style>'
    )
    return head + "</head><body>" + "\n".join(part for part in parts if part) + "</body></html>\n"


def _verdict(ruling: Ruling, objectives: tuple[float, float] | None) -> str:
    goals = f" within {objectives[0]:g} ms TTFT and {objectives[1]:g} ms ITL" if objectives else ""
    said = f"<b>{escape(ruling.mode)}</b> for this workload{goals}" if ruling.mode else "<b>No verdict</b>"
    return (
        f'<div class="verdict"><p>{said}: {escape(ruling.why)}.</p><p>The rule: {escape(ruling.rule)} '
        "It speaks of what was measured here and of no other machine.</p></div>"
    )


def _figures(results: Results, objectives: tuple[float, float] | None) -> Iterable[str]:
    for output_len in sorted({entry.output_len for entry in results.series}):
        for metric in ("ttft", "tpot", "itl", *(("goodput",) if objectives else ())):
            yield f"<h2>{escape(figures.TITLES[metric].capitalize())}, {output_len} output tokens</h2>"
            yield figures.svg(figures.panels(results, metric, "input", objectives, output_len))


def _timelines(results: Results) -> Iterable[str]:
    """Of each mode that moves KV, one transfer at the heaviest load that has one in all of them."""
    told: dict[tuple[int, float, int], dict[str, dict[str, Any]]] = {}
    for ours in results.ours():
        if any(line["event"] == "posted" for line in ours.get("story", ())):
            point = ours["point"]
            key = (point["input_len"], point["qps"], point["output_len"])
            told.setdefault(key, {}).setdefault(point["mode"], ours)
    if not told:
        return
    key = max(told, key=lambda key: (len(told[key]), key))
    for mode in sorted(told[key], key=results.modes().index):
        ours = told[key][mode]
        yield f"<h2>One transfer in time: {escape(mode)}</h2>"
        text = f"{captions.transfer(ours['story'])}, its TTFT the median of its run; {captions.run(ours)}"
        yield figures.svg(figures.timeline(ours["story"], text))


def _points(series: Sequence[Series]) -> str:
    rows = []
    for entry in series:
        facts = entry.facts()
        cells = [entry.mode, f"{entry.qps:g}", entry.input_len, entry.output_len, facts["num"]]
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            cells += [_ms(facts[name][key]) for key in ("mean", "p50", "p90", "p99")]
        rows.append([*cells, f"{entry.requests_per_s:.2f}"])
    head = ["mode", "req/s asked", "input", "output", "n"]
    for name in ("TTFT", "TPOT", "ITL"):
        head += [f"{name} mean", "p50", "p90", "p99"]
    return "<p>Milliseconds; all iterations of a point together.</p>" + _table([*head, "req/s served"], rows)


def _transfers(series: Sequence[Series]) -> str:
    rows = []
    for entry in series:
        for number, told in enumerate(entry.facts()["transfers"], 1):
            exposed, pieces = told.get("exposed_ms") or {}, told.get("descriptors") or {}
            moved, expected = told.get("moved_bytes"), told.get("expected_bytes")
            if moved == expected == 0:
                continue
            rows.append(
                [
                    *(entry.mode, f"{entry.qps:g}", entry.input_len, entry.output_len, number),
                    *(_mib(moved), _mib(expected), _ms(pieces.get("p50"))),
                    *(_ms(exposed.get(key)) for key in ("p50", "p90", "p99")),
                    told.get("by", ""),
                ]
            )
    head = ["mode", "req/s", "input", "output", "run", "moved MiB", "expected MiB", "descriptors p50"]
    head += ["exposed ms p50", "p90", "p99", "told by"]
    note = "<p>Exposed: from the end of prefill until everything had landed at decode.</p>"
    return f"<h2>Transfers</h2>{note}{_table(head, rows)}" if rows else ""


def _ruling_table(ruling: Ruling) -> str:
    modes = list(ruling.scores)
    rows = [
        [f"{row.workload[0]:g}", row.workload[1], row.workload[2], *(f"{row.values[m]:.3g}" for m in modes), row.best]
        for row in ruling.rows
    ]
    head = ["req/s", "input", "output", *modes, "best"]
    return f"<h2>The verdict, workload by workload</h2>{_table(head, rows)}" if rows else ""


def _refused(results: Results) -> str:
    if not results.void:
        return "<h2>Refused points</h2><p>None.</p>"
    rows = [[void.point.name, "; ".join(void.reasons)] for void in results.void]
    return f'<h2>Refused points</h2><div class="void">{_table(["point", "reason"], rows, left=2)}</div>'


def _method(settings: dict[str, Any], ours: Sequence[dict[str, Any]]) -> Iterable[str]:
    if not ours:
        yield "The files of this folder were not written by kvferry: how they were made is not known here."
        return
    behind = settings.get("router")
    yield ROUTER if behind else SIM if settings.get("engine") == "sim" else REAL
    if any(str(arg).startswith("--byte-scale") for arg in settings.get("engine_args") or ()):
        yield "--byte-scale N: a token's KV has an Nth of the real model's bytes, in as many pieces."
    counts = "/".join(sorted({str(entry["settings"].get("num")) for entry in ours}, key=lambda n: (len(n), n)))
    loads = " and ".join(dict.fromkeys(f"{e['generator'].get('name')} {e['generator'].get('version')}" for e in ours))
    started = "" if behind else f", {settings.get('prefill')} prefill and {settings.get('decode')} decode engines"
    yield escape(
        f"Measured: {captions.what(settings)}{started}; {captions.where(ours)}. Load: {loads}, {counts} requests "
        f"per run, {settings.get('arrival')} arrivals, prompts sent as {settings.get('prompts', 'not told')}, seed "
        f"{settings.get('seed')}, {settings.get('warm_ups')} warm-up requests before each run. Engine arguments: "
        f"{' '.join(map(str, settings.get('engine_args') or ())) or 'none beside ours'}."
    )
    yield (
        "TTFT: from sending (from when it was due, with load builtin) to the first event with a token. ITL: between "
        "such events. TPOT: from the first to the last token, over the tokens after the first. One deployment per "
        "mode, one after the other; prompts and send times are the same in every mode."
    )
    yield (
        "A run is refused where a request failed or its answer had not the tokens asked for, a prompt had another "
        "length, the bytes moved are not those of the prompts' KV, a prefix cache served tokens, the warm-up was "
        f"missing, the load generator was late (median above {LATE_SHARE:.0%} of the mean interval) or an engine "
        f"overran its timing model (above {LATE_SHARE:.0%} of the run)."
    )


def _environment(ours: Sequence[dict[str, Any]]) -> str:
    if not ours:
        return ""
    told: dict[str, list[str]] = {}
    for entry in ours:
        for name, value in entry["environment"].items():
            if value is not None and str(value) not in told.setdefault(name, []):
                told[name].append(str(value))
    if "date" in told:
        told["date"] = [" to ".join(sorted({min(told["date"]), max(told["date"])}))]
    rows = [[name, ", ".join(values)] for name, values in told.items()]
    command = " ".join(map(str, ours[0]["generator"].get("command") or ()))
    shown = (
        f"<p>The load generator's command, of the first point: <code>{escape(command)}</code></p>" if command else ""
    )
    return f"<h2>Environment</h2>{_table(['', ''], rows, left=2)}{shown}"


def _table(head: Sequence[object], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        made = [f"<{tag}{' class=l' if i < left else ''}>{escape(str(cell))}</{tag}>" for i, cell in enumerate(cells)]
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.2f}"
