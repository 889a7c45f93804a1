"""The highest rate that holds: doubling until one does not, then halving the interval, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """`rate` holds, `broken` does not; None: no rate tried held, or none was too high."""

    rate: float | None
    broken: float | None


def highest(
    holds: Callable[[float], bool | None], start: float, *, floor: float, ceiling: float, tolerance: float = 0.05
) -> Found:
    """The two are at most `tolerance` apart in the end, unless one is None. Each rate is asked for once; `holds` should
    be true up to some rate and false above it, or None: this one does not, and no lower one will. Below `floor` and
    above `ceiling` nothing is tried.
    """
    good: float | None = None
    bad: float | None = None
    rate = min(max(start, floor), ceiling)
    while good is None or bad is None:
        held = holds(rate)
        if held:
            good = rate
            if rate >= ceiling:
                return Found(good, None)
            rate = rate if bad is not None else min(rate * 2, ceiling)
        else:
            bad = rate
            if rate <= floor or (held is None and good is None):
                return Found(None, bad)
            rate = rate if good is not None else max(rate / 2, floor)
    while bad / good > 1 + tolerance:
        middle = math.sqrt(good * bad)
        if holds(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)
