"""What `kvferry bench transfer` found, as JSON and as a table: the same facts twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvferry.bench.environment import environment
from kvferry.bench.report import aligned
from kvferry.bench.transfer_bench import PREFILL_OF_PUSH, Job, Ours, Samples
from kvferry.bench.transfer_pair import transports
from kvferry.bench.transfer_records import Raw
from kvferry.bench.transfer_shape import pool_blocks

Spread = dict[str, float]
_OURS = ("plan_ms", "post_ms", "wire_ms", "landed_ms", "exposed_ms", "engine_thread_ms")


def spread(values: Sequence[float]) -> Spread:
    found = np.asarray(values, dtype=np.float64)
    facts = {"median": np.median(found), "min": found.min(), "max": found.max()}
    return {name: round(float(value), 4) for name, value in facts.items()}


def facts_of(job: Job, samples: Samples, load: float) -> dict[str, Any]:
    """Milliseconds and GB/s (10^9 bytes) as medians with the extremes. `load`: the load average before."""
    facts = {
        "descriptors": _whole(samples.ours, lambda one: one.descriptors),
        **_ours(samples.ours),
        "gb_per_s": spread([_speed(job, one) for one in samples.ours]),
        "engine_thread": {
            "prefill_ms": spread([one.prefill_thread_ms for one in samples.ours]),
            "decode_ms": spread([one.decode_thread_ms for one in samples.ours]),
        },
        "verify": {
            "prefill_ms": spread([one.prefill_verify_ms for one in samples.ours]),
            "decode_ms": spread([one.decode_verify_ms for one in samples.ours]),
        },
        "late_ms": spread([one.late_ms for one in samples.ours]),
        "posts": _whole(samples.ours, lambda one: one.posts),
        "bytes": job.nbytes,
        "floor": {
            "gb_per_s": spread([one.nbytes / one.total_s / 1e9 for one in samples.floor]),
            "landed_ms": spread([one.total_s * 1e3 for one in samples.floor]),
        },
        "naive": _naive(samples.naive),
    }
    if samples.push:
        facts["push"] = {"descriptors": _whole(samples.push, lambda one: one.descriptors), **_ours(samples.push)}
    facts["ratios"] = _ratios(facts)
    return {
        **facts,
        "arguments": _arguments(job, samples.prefill_ms),
        "environment": {**environment(), "ucx": transports(), "loadavg_1m_before": round(load, 2)},
        "runs": {name: [asdict(one) for one in getattr(samples, name)] for name in ("ours", "push", "floor", "naive")},
    }


def _ours(samples: Sequence[Ours]) -> dict[str, Spread]:
    return {name: spread([getattr(one, name) for one in samples]) for name in _OURS}


def _naive(samples: Sequence[Raw]) -> dict[str, Any]:
    """Planning and posting hold the engine's thread; polling would too, but is not counted."""
    return {
        "descriptors": _whole(samples, lambda one: one.descriptors),
        "op": samples[0].op,
        "plan_ms": spread([one.plan_s * 1e3 for one in samples]),
        "post_ms": spread([one.post_s * 1e3 for one in samples]),
        "landed_ms": spread([one.total_s * 1e3 for one in samples]),
        "engine_thread_ms": spread([(one.plan_s + one.post_s) * 1e3 for one in samples]),
    }


def _speed(job: Job, one: Ours) -> float:
    """Stream waits for prefill between its WRITEs, so only the time on the wire counts there."""
    return job.nbytes / (one.wire_ms if job.mode == "stream" else one.landed_ms) / 1e6


def _whole(samples: Sequence[Any], of: Callable[[Any], int]) -> int:
    return round(float(np.median([of(one) for one in samples])))


def _ratios(facts: dict[str, Any]) -> dict[str, float]:
    """Of medians. Stream takes as long as prefill does, so against naive stands push there."""

    def ratio(a: Spread, b: Spread) -> float:
        return round(a["median"] / b["median"], 4)

    naive, landed = facts["naive"], facts.get("push", facts)["landed_ms"]
    copying = naive["landed_ms"]["median"] - naive["plan_ms"]["median"]
    found = {
        "gb_per_s_to_floor": ratio(facts["gb_per_s"], facts["floor"]["gb_per_s"]),
        "landed_to_naive": ratio(landed, naive["landed_ms"]),
        "landed_to_naive_copying": round(landed["median"] / copying, 4),
    }
    if "push" in facts:
        found["exposed_to_push"] = ratio(facts["exposed_ms"], facts["push"]["landed_ms"])
    return found


def _arguments(job: Job, prefill_ms: float | None) -> dict[str, Any]:
    given = asdict(job)
    return {
        **given,
        "prefill_ms": None if prefill_ms is None else round(prefill_ms, 3),
        "prefill_of_push": PREFILL_OF_PUSH if prefill_ms is not None and job.prefill_ms is None else None,
        "pool_blocks": pool_blocks(job.blocks),
        "blocks": job.blocks,
    }


# -- the table -------------------------------------------------------------------------------------------------------


def text(facts: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("", "median", "min", "max", "")]

    def add(name: str, figures: Spread, unit: str, digits: int = 2) -> None:
        cells = (f"{figures[key]:.{digits}f}" for key in ("median", "min", "max"))
        rows.append((name, *cells, unit))

    add("plan", facts["plan_ms"], "ms")
    add("post", facts["post_ms"], "ms")
    add("on the wire", facts["wire_ms"], "ms")
    add("landed", facts["landed_ms"], "ms")
    add("exposed", facts["exposed_ms"], "ms")
    add("engine thread, prefill", facts["engine_thread"]["prefill_ms"], "ms", 3)
    add("engine thread, decode", facts["engine_thread"]["decode_ms"], "ms", 3)
    add("verify, prefill", facts["verify"]["prefill_ms"], "ms")
    add("verify, decode", facts["verify"]["decode_ms"], "ms")
    add("speed", facts["gb_per_s"], "GB/s")
    if "push" in facts:
        add("push: landed", facts["push"]["landed_ms"], "ms")
    add("floor: landed", facts["floor"]["landed_ms"], "ms")
    add("floor: speed", facts["floor"]["gb_per_s"], "GB/s")
    add("naive: plan", facts["naive"]["plan_ms"], "ms")
    add("naive: post", facts["naive"]["post_ms"], "ms")
    add("naive: landed", facts["naive"]["landed_ms"], "ms")
    add("naive: engine thread", facts["naive"]["engine_thread_ms"], "ms")
    return "\n".join([_head(facts), "", aligned(rows), "", *_notes(facts)])


def _head(facts: dict[str, Any]) -> str:
    asked = facts["arguments"]
    shape = asked["shape"]
    sizes = "x".join(str(shape[name]) for name in ("layers", "heads", "head_size", "block_size"))
    line = (
        f"{asked['mode']} of {asked['tokens']} tokens, {sizes} {asked['layout']}, fragmentation "
        f"{asked['fragmentation']:g}, verify {asked['verify']}: {facts['bytes'] / 2**20:.1f} MiB in "
        f"{facts['descriptors']} descriptors, {facts['posts']} posts (naive: {facts['naive']['descriptors']} "
        f"descriptors); {asked['runs']} runs"
    )
    if asked["staging"] != "auto":
        line += f"; staging {asked['staging']}"
    if asked["prefill_ms"] is not None:
        how = f"{asked['chunks']} chunks, {asked['layer_groups']} layer groups"
        line += f"; prefill of {asked['prefill_ms']:.1f} ms in {how}"
    return line


def _notes(facts: dict[str, Any]) -> list[str]:
    ratios = facts["ratios"]
    ours = "push's" if "push" in facts else "ours"
    notes = [
        f"speed / floor's: {ratios['gb_per_s_to_floor']:.3f}",
        f"landed, {ours} / naive's: {ratios['landed_to_naive']:.3f} "
        f"({ratios['landed_to_naive_copying']:.3f} of naive's without its planning)",
    ]
    if "exposed_to_push" in ratios:
        notes.append(f"exposed / push's landed: {ratios['exposed_to_push']:.3f}")
    if facts["environment"]["loadavg_1m_before"] > 0.5:
        notes.append(f"the machine was not quiet: load average {facts['environment']['loadavg_1m_before']} before")
    return notes
