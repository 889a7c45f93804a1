"""A report as lines for a terminal and as JSON: the same facts twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvferry.doctor.examine import Pair, Report
from kvferry.doctor.findings import Finding
from kvferry.doctor.path import OPS, Way, bytes_text, rate_text, routes_of, seconds_text
from kvferry.doctor.reach import Engine

_ENDS = {
    0: "fine",
    1: "it works, and would disappoint: see the warnings",
    2: "broken: see what is marked FAIL",
}


def line(finding: Finding) -> str:
    """One finding, and under it what to do."""
    text = f"{finding.status:<5} {finding.check:<20} {finding.subject}: {finding.said}"
    return f"{text}\n{'':<26} -> {finding.todo}" if finding.todo else text


def closing(report: Report) -> Iterator[str]:
    """The measured tables, the verdicts, the end."""
    for pair in report.pairs:
        for way in pair.ways:
            yield from _table(way)
    yield ""
    for pair in report.pairs:
        yield f"verdict {pair.prefill} -> {pair.decode}: {verdict(pair)}"
    yield f"exit {report.code}: {_ENDS[report.code]}"


def verdict(pair: Pair) -> str:
    if pair.broken:
        measured = f" (by speed alone: {pair.advice.verdict}, {pair.advice.reason})" if pair.predictions else ""
        return f"broken: put right what is marked FAIL first{measured}"
    return f"{pair.advice.verdict}: {pair.advice.reason}"


def facts(report: Report) -> dict[str, Any]:
    """For `--json`."""
    return {
        "exit_code": report.code,
        "summary": _ENDS[report.code],
        "checks": [msgspec.to_builtins(finding) for finding in report.findings],
        "engines": [_engine(engine) for engine in report.engines],
        "pairs": [
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "verdict": "broken" if pair.broken else pair.advice.verdict,
                "reason": pair.advice.reason,
                "predictions": [msgspec.to_builtins(one) for one in pair.predictions],
                "ranks": [_way(way) for way in pair.ways],
            }
            for pair in report.pairs
        ],
    }


def _engine(engine: Engine) -> dict[str, Any]:
    ranks = []
    for rank, about in sorted(engine.ranks.items()):
        layout = about.layout
        ranks.append(
            {
                "rank": rank,
                "machine": about.machine,
                "device": layout.device,
                "planes": len(layout.planes),
                "num_blocks": layout.num_blocks,
                "block_size": layout.block_size,
                "heads": layout.heads,
                "total_heads": layout.total_heads,
                "divisible": layout.divisible,
                "fingerprint": layout.fingerprint,
            }
        )
    first = engine.ranks.get(0)
    told = {} if first is None else msgspec.structs.asdict(first)
    names = ("engine_id", "role", "tp_size", "mode", "background", "backends", "versions")
    return {
        "target": msgspec.to_builtins(engine.target),
        **{name: told[name] for name in names if name in told},
        "served_models": engine.models,
        "clock_ahead_s": engine.ahead_s if first else None,
        "clock_give_or_take_s": engine.give_or_take_s if first else None,
        "ranks": ranks,
    }


def _way(way: Way) -> dict[str, Any]:
    probed = way.probed
    return {
        "prefill_rank": way.p_rank,
        "decode_rank": way.d_rank,
        "failure": probed.failure,
        "routes": [msgspec.to_builtins(route) for op in OPS for route in routes_of(way, op)],
        "prefill": None if probed.prefill is None else msgspec.to_builtins(probed.prefill),
        "decode": None if probed.decode is None else msgspec.to_builtins(probed.decode),
        "points": [
            {**msgspec.to_builtins(point), "bytes_per_s": point.nbytes / point.median_s} for point in probed.points
        ],
    }


def _table(way: Way) -> Iterator[str]:
    if not way.probed.points:
        return
    yield ""
    yield f"{way.name}, medians"
    sizes = sorted({point.nbytes for point in way.probed.points})
    yield f"{'':<22}" + "".join(f"{bytes_text(size):>12}" for size in sizes)
    for op in OPS:
        for scattered in (False, True):
            by_size = {point.nbytes: point for point in way.series(op, scattered)}
            times = [seconds_text(by_size[size].median_s) if size in by_size else "-" for size in sizes]
            rates = [rate_text(size / by_size[size].median_s) if size in by_size else "-" for size in sizes]
            yield f"{op}, {'4 KiB pieces' if scattered else 'one piece':<17}" + "".join(f"{one:>12}" for one in times)
            yield f"{'':<22}" + "".join(f"{one:>12}" for one in rates)
