"""How long a sweep still takes: by its plan at first, then by how long its points really took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.points import Point

TOKEN_S = 0.02
"""Of one output token, for the tail that runs on after the last request has left."""


@dataclass
class Pace:
    """`overhead_s`: of each call of the load generator. `start_s`: of each deployment."""

    overhead_s: float
    start_s: float
    num: int
    warm_ups: int
    planned: float = 0.0
    spent: float = 0.0

    def point_s(self, point: Point) -> float:
        tail = point.output_len * TOKEN_S
        return self.overhead_s + self.warm_ups * tail + self.num / point.qps + tail

    def took(self, point: Point, seconds: float) -> None:
        self.planned += self.point_s(point)
        self.spent += seconds

    def left_s(self, points: Sequence[Point], running: str = "") -> float:
        """Of these points; `running`: the mode whose deployment is up already."""
        ratio = self.spent / self.planned if self.planned else 1.0
        starts = {point.mode for point in points} - {running}
        return ratio * sum(self.point_s(point) for point in points) + self.start_s * len(starts)


def spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
