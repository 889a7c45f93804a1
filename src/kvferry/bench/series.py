"""The points of a results folder, iterations of one point taken together, ready for figures and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.points import COUNT, OURS, Point, point_named, read, settings_in
from kvferry.bench.stats import summary
from kvferry.errors import ConfigError

METRICS = ("ttft", "tpot", "itl")
PARTS = ("point", "settings", "environment", "generator", "transfer")
"""What each of our files tells of its run."""
Key = tuple[str, float, int, int]


@dataclass
class Series:
    """All requests of all iterations of (mode, qps, input_len, output_len). Milliseconds; `tpot[i]` is of the request
    of `ttft[i]`, 0 where it has one token only. `files`: what each iteration's file holds beside its samples.
    """

    mode: str
    qps: float
    input_len: int
    output_len: int
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        return sum(self.rates) / len(self.rates)

    def values(self, metric: str) -> list[float]:
        found: list[float] = getattr(self, metric)
        return [value for value in found if value > 0] if metric == "tpot" else found

    def goodput(self, ttft_ms: float, itl_ms: float) -> float:
        """Requests per second whose first token and whose mean time between tokens came within these."""
        good = sum(a <= ttft_ms and b <= itl_ms for a, b in zip(self.ttft, self.tpot, strict=True))
        return good / sum(self.durations)

    def facts(self) -> dict[str, Any]:
        """One entry of the report's `points`."""
        ours = [file[OURS] for file in self.files if OURS in file]
        return {
            "mode": self.mode,
            "qps": self.qps,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "iterations": len(self.files),
            "num": len(self.ttft),
            "ttft_ms": summary(self.ttft),
            "tpot_ms": summary(self.values("tpot")),
            "itl_ms": summary(self.itl),
            "requests_per_s": round(self.requests_per_s, 4),
            "transfers": [entry["transfer"] for entry in ours],
        }


@dataclass(frozen=True)
class Void:
    point: Point
    reasons: Sequence[str]


@dataclass(frozen=True)
class Results:
    series: Sequence[Series]
    void: Sequence[Void]

    def modes(self) -> list[str]:
        return list(dict.fromkeys(entry.mode for entry in self.series))

    def ours(self) -> list[dict[str, Any]]:
        """What each of our files says of its run."""
        return [file[OURS] for entry in self.series for file in entry.files if OURS in file]


ORDER = ("colocated", "upstream-pull", "pull-inline", "pull", "upstream-push", "push", "stream")


def load(folder: Path) -> Results:
    """Raises `ConfigError` where there is no point, one without the times of its requests, or points that were not made
    alike. A file of vLLM's own with failed requests is void.
    """
    if not folder.is_dir():
        raise ConfigError(f"--results: {folder} is no folder", hint="the one that `kvferry bench sweep` wrote to")
    found: dict[Key, Series] = {}
    void: list[Void] = []
    taken: dict[Point, Path] = {}
    alike: tuple[Path, dict[str, Any]] | None = None
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".void.json"):
            point = point_named(path.name.removesuffix(".void.json"))
            if point is not None and not (folder / f"{point.name}.json").exists():
                void.append(Void(point, _reasons(path)))
            continue
        point = point_named(path.stem)
        if point is None:
            continue
        if point in taken:
            raise ConfigError(f"{path} and {taken[point]} are of the same point", hint="remove one of them")
        taken[point] = path
        facts = _read(path)
        if (settings := settings_in(facts)) is not None:
            alike = alike or (path, settings)
            _refuse_unlike(path, settings, *alike)
        if failed := sum(
            not (ttft and tokens) for ttft, tokens in zip(facts["ttfts"], facts["output_lens"], strict=True)
        ):
            void.append(Void(point, [f"{failed} of {len(facts['ttfts'])} requests failed or have no token"]))
            continue
        key = (point.mode, point.qps, point.input_len, point.output_len)
        _take(facts, found.setdefault(key, Series(*key)))
    if not found and not void:
        raise ConfigError(
            f"--results: {folder} holds no point of a sweep", hint="files are named <mode>_qps.._in.._out.._iter...json"
        )

    def place(entry: Series) -> tuple[int, str, int, int, float]:
        rank = ORDER.index(entry.mode) if entry.mode in ORDER else len(ORDER)
        return rank, entry.mode, entry.output_len, entry.input_len, entry.qps

    return Results(sorted(found.values(), key=place), void)


def _reasons(path: Path) -> list[str]:
    reasons = (read(path) or {}).get("reasons")
    return [str(reason) for reason in reasons] if isinstance(reasons, list) else ["its file is damaged"]


def _refuse_unlike(path: Path, settings: dict[str, Any], first: Path, expected: dict[str, Any]) -> None:
    """Raises `ConfigError` where two results differ in a setting that both tell."""
    for name in sorted(settings.keys() & expected.keys() - {COUNT}):
        if settings[name] != expected[name]:
            told = f"{name} {settings[name]!r}, {first.name} with {expected[name]!r}"
            raise ConfigError(f"{path} was made with {told}", hint="they can't be compared: one folder per sweep")


def _read(path: Path) -> dict[str, Any]:
    """A result's file, looked at as far as it is used. Raises `ConfigError`."""
    facts = read(path)
    if facts is None:
        raise ConfigError(f"{path} is damaged", hint="remove it and run the sweep again")
    for name in ("ttfts", "itls", "output_lens"):
        if not isinstance(facts.get(name), list):
            hint = "vllm bench serve writes them with --save-detailed"
            raise ConfigError(f"{path} has no {name}, the times of its requests", hint=hint)
    rows = list(zip(facts["ttfts"], facts["itls"], facts["output_lens"], strict=False))
    whole = (
        0 < len(rows) == len(facts["ttfts"]) == len(facts["itls"]) == len(facts["output_lens"])
        and all(_is_time(a) and isinstance(b, list) and all(map(_is_time, b)) and _is_time(c) for a, b, c in rows)
        and all(_is_time(facts.get(name)) for name in ("duration", "request_throughput"))
        and facts["duration"] > 0
        and (OURS not in facts or _is_told(facts[OURS]))
    )
    if not whole:
        raise ConfigError(f"{path} is damaged: parts of a result are missing", hint="remove it, run the sweep again")
    return facts


def _is_told(ours: object) -> bool:
    return isinstance(ours, dict) and all(isinstance(ours.get(name), dict) for name in PARTS)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _take(facts: dict[str, Any], series: Series) -> None:
    for ttft, gaps, tokens in zip(facts["ttfts"], facts["itls"], facts["output_lens"], strict=True):
        series.ttft.append(ttft * 1e3)
        series.tpot.append(sum(gaps) * 1e3 / (tokens - 1) if tokens > 1 else 0.0)
        series.itl += [gap * 1e3 for gap in gaps]
    series.rates.append(float(facts["request_throughput"]))
    series.durations.append(float(facts["duration"]))
    series.files.append({key: value for key, value in facts.items() if not isinstance(value, list)})
