"""Ratios of modes, and the bounds they are held to where the conditions of the bounds are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.bench.stats import ratio_of_medians

Metric = Literal["ttft_ms", "tpot_ms"]
JUDGED_ENGINE = "vllm"
JUDGED_INPUT_LEN = 500
JUDGED_NUM = 10
HOOKS_BOUND_MS = 1.0


@dataclass(frozen=True)
class Bound:
    """median(numerator) / median(denominator) of `metric` shall be at most `bound`."""

    metric: Metric
    numerator: str
    denominator: str
    bound: float


# What the project holds itself to, each for real vLLM engines, both sides tuned, and 500-token prompts, one at a time,
# at least 10 per mode.
BOUNDS = (
    Bound("ttft_ms", "push", "upstream-push", 0.95),
    Bound("ttft_ms", "push", "upstream-pull", 0.7),
    Bound("ttft_ms", "push", "colocated", 1.15),
    Bound("ttft_ms", "pull", "upstream-pull", 0.9),
    Bound("tpot_ms", "push", "upstream-push", 1.02),
    Bound("tpot_ms", "pull", "upstream-pull", 1.02),
)
OURS = ("push", "pull")
FIRST_BOUND = 1.5


def ratios(results: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Every bound whose two modes were measured, and first/later of our modes, for each prompt length."""
    found = []
    by_key = {(entry["mode"], entry["input_len"]): entry for entry in results}
    lengths = sorted({entry["input_len"] for entry in results})
    for length in lengths:
        for bound in BOUNDS:
            above, below = by_key.get((bound.numerator, length)), by_key.get((bound.denominator, length))
            if above is None or below is None:
                continue
            a, b = _values(above["samples"], bound.metric), _values(below["samples"], bound.metric)
            if a and b:
                name = f"{bound.numerator}/{bound.denominator}"
                facts = _ratio(name, bound.metric, length, a, b, bound.bound, seed)
                found.append({**facts, **_judged(facts, above, below)})
        for mode in OURS:
            entry = by_key.get((mode, length))
            firsts = _values(entry["first_samples"], "ttft_ms") if entry else []
            if entry and firsts:
                later = _values(entry["samples"], "ttft_ms")
                facts = _ratio(f"{mode} first/later", "ttft_ms", length, firsts, later, FIRST_BOUND, seed)
                facts["worst"] = round(max(firsts) / entry["ttft_ms"]["p50"], 3)
                found.append({**facts, **_judged(facts, entry)})
    return found


def hook_verdicts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median time of our hooks per request, of each side of our modes."""
    found = []
    for entry in results:
        for side, stats in (entry["hooks_ms"] or {}).items():
            facts = {
                "name": f"{entry['mode']} hooks, {side}",
                "metric": "hooks_ms",
                "input_len": entry["input_len"],
                "value": stats["p50"],
                "bound": HOOKS_BOUND_MS,
            }
            found.append({**facts, **_judged(facts, entry, below=True)})
    return found


def _values(samples: Sequence[dict[str, Any]], metric: Metric) -> list[float]:
    return [float(sample[metric]) for sample in samples if sample[metric] is not None]


def _ratio(
    name: str, metric: str, length: int, a: list[float], b: list[float], bound: float, seed: int
) -> dict[str, Any]:
    ratio = ratio_of_medians(a, b, seed=seed)
    return {
        "name": name,
        "metric": metric,
        "input_len": length,
        "value": round(ratio.value, 4),
        "low": round(ratio.low, 4),
        "high": round(ratio.high, 4),
        "bound": bound,
    }


def _judged(facts: dict[str, Any], *entries: dict[str, Any], below: bool = False) -> dict[str, Any]:
    """`met` None, and why, where the run is not the one that the bound speaks of. `below`: the bound itself is not."""
    if any(entry["engine"] != JUDGED_ENGINE for entry in entries):
        return {"met": None, "why": "the bound is for real vLLM engines, this engine's time is modelled"}
    if facts["input_len"] != JUDGED_INPUT_LEN:
        return {"met": None, "why": f"the bound is for {JUDGED_INPUT_LEN}-token prompts"}
    if any(entry["qps"] is not None for entry in entries):
        return {"met": None, "why": "the bound is for one request at a time"}
    if any(entry["num"] < JUDGED_NUM for entry in entries):
        return {"met": None, "why": f"the bound asks for {JUDGED_NUM} requests per mode"}
    value, bound = facts["value"], facts["bound"]
    return {"met": bool(value < bound if below else value <= bound), "why": ""}
