"""Goodput: requests per second that meet both objectives, TTFT and ITL, at the highest rate at which enough of them do.

A request holds its TTFT objective if its first token came in time, and its ITL objective if its mean time between
tokens (its TPOT) is within it. A failed request holds neither, and a rate at which one failed does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.records import Sample

SHARE = 0.99
"""Of the requests of a run that must meet both objectives."""


@dataclass(frozen=True)
class Objectives:
    """Milliseconds; both bounds are included."""

    ttft_ms: float
    itl_ms: float

    def met(self, sample: Sample) -> bool:
        if sample.error or not sample.tokens:
            return False
        return sample.ttft_ms <= self.ttft_ms and (sample.tpot_ms or 0.0) <= self.itl_ms

    def good(self, samples: Sequence[Sample]) -> int:
        return sum(self.met(sample) for sample in samples)


@dataclass(frozen=True)
class Workload:
    input_len: int
    output_len: int
    start: float = 1.0
    floor: float = 0.05
    ceiling: float = 256.0
    seconds: float = 10.0
    """A probe sends for at least so long."""

    def num(self, least: int, rate: float) -> int:
        return max(least, math.ceil(rate * self.seconds))


@dataclass
class ModeResult:
    """`rate`: the highest that held, None: none did. `limit`: what the search ended at."""

    mode: str
    rate: float | None = None
    limit: str = ""
    probes: list[dict[str, Any]] = field(default_factory=list)
    void: str = ""

    def best(self) -> dict[str, Any] | None:
        return next((probe for probe in self.probes if probe["qps"] == self.rate and probe["holds"]), None)

    def facts(self) -> dict[str, Any]:
        best = self.best()
        keys = ("goodput_rps", "share_within", "num", "requests_per_s", "ttft_ms", "tpot_ms")
        told = {key: best[key] for key in keys} if best else dict.fromkeys(keys)
        return {"mode": self.mode, "rate": self.rate, "limit": self.limit, "void": self.void, **told}
