"""Summaries of samples, and the interval of a ratio of medians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Summary = dict[str, float | int | None]

RESAMPLES = 10_000


def summary(values: Sequence[float], digits: int = 3) -> Summary:
    """Mean and percentiles, by linear interpolation between order statistics (numpy's default, Hyndman-Fan type 7)."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None, "min": None, "max": None, "n": 0}
    table = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(table, [50, 90, 99])
    facts = {"mean": table.mean(), "p50": p50, "p90": p90, "p99": p99, "min": table.min(), "max": table.max()}
    return {**{name: round(float(value), digits) for name, value in facts.items()}, "n": len(values)}


@dataclass(frozen=True)
class Ratio:
    """median(a) / median(b) with its 95% interval [low, high]."""

    value: float
    low: float
    high: float


def ratio_of_medians(a: Sequence[float], b: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Ratio:
    """Percentile bootstrap (Efron 1979): each side is resampled by itself, with replacement; the interval is the 2.5th
    to 97.5th percentile of the resampled ratios. Requests of one engine start are not independent, so with few starts
    the interval is narrower than the truth.
    """
    if not a or not b:
        raise ValueError("a ratio needs samples on both sides")
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    random = np.random.default_rng(seed)
    above = np.median(random.choice(x, (resamples, len(x))), axis=1)
    below = np.median(random.choice(y, (resamples, len(y))), axis=1)
    low, high = np.percentile(above / below, [2.5, 97.5])
    return Ratio(float(np.median(x) / np.median(y)), float(low), float(high))
