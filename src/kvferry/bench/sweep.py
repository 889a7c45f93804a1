"""The published sweep: one deployment per mode, one after the other; a file per point."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.load import Load
from kvferry.bench.measure import Measured, Rules, job_of, measure
from kvferry.bench.pace import Pace, spoken
from kvferry.bench.points import OURS, Folder, Point
from kvferry.bench.records import Sample
from kvferry.bench.target import Report, Setup, Target, indented, opened
from kvferry.errors import ConfigError, KVFerryError
from kvferry.launch.cancel import Cancel
from kvferry.launch.state import StateDir
from kvferry.story import read_story


@dataclass
class Outcome:
    """`skipped`: were there already. `void`: point and first reason."""

    done: list[Point] = field(default_factory=list)
    skipped: list[Point] = field(default_factory=list)
    void: list[tuple[Point, str]] = field(default_factory=list)


class Sweep:
    """Made, run once. One thread owns it."""

    def __init__(
        self, setup: Setup, rules: Rules, load: Load, points: Sequence[Point], folder: Folder, state: Path
    ) -> None:
        self.setup, self.rules, self.load, self.points = setup, rules, load, points
        self.folder, self._state = folder, state
        self.outcome = Outcome()
        self._pace = Pace(load.overhead_s, setup.start_s, rules.num, rules.warm_ups)

    def settings(self) -> dict[str, Any]:
        """What a result there must have been made with to count as this sweep's."""
        return {**self.setup.facts(), **self.rules.facts(), "load": self.load.name}

    def run(self, report: Report, cancel: Cancel) -> Outcome:
        """Raises `ConfigError` before anything is started, and `Stopped`."""
        settings = self.settings()
        self.folder.check(settings)
        todo: list[Point] = []
        for point in self.points:
            (self.outcome.skipped if self.folder.done(point, settings) else todo).append(point)
        if self.outcome.skipped:
            report(f"{len(self.outcome.skipped)} of {len(self.points)} points are in {self.folder.path} already")
        if todo:
            report(f"{len(todo)} points, load {self.load.name}, about {spoken(self._pace.left_s(todo))}")
        while todo:
            mode = todo[0].mode
            mine = [point for point in todo if point.mode == mode]
            todo = [point for point in todo if point.mode != mode]
            self._mode(mine, todo, report, cancel)
        return self.outcome

    def _mode(self, mine: list[Point], later: list[Point], report: Report, cancel: Cancel) -> None:
        mode = mine[0].mode
        state = self._state / mode
        try:
            with opened(self.setup, mode, state, self.load, self.rules.prompts, indented(report), cancel) as target:
                while mine:
                    self._point(target, mine, later, report, cancel)
                    if died := target.died():
                        self._give_up(mine, died, report)
                        mine = []
        except ConfigError:
            raise  # would be the same in every mode
        except KVFerryError as error:
            self._give_up(mine, f"{mode}: {error}", report)

    def _point(self, target: Target, mine: list[Point], later: list[Point], report: Report, cancel: Cancel) -> None:
        """Measures `mine[0]` and takes it off the list."""
        point, begun = mine[0], time.monotonic()
        number = len(self.points) - len(mine) - len(later) + 1
        report(f"[{number}/{len(self.points)}] {point.name}")
        with tempfile.TemporaryDirectory(prefix="kvferry-log-") as scratch:
            log = Path(scratch) / "log"
            job = job_of(target, self.rules, point, log)
            measured = measure(target, self.load, job, point, cancel, indented(report))
            said = log.read_text(errors="replace") if log.exists() else ""
        del mine[0]
        measured.facts[OURS]["settings"] = self.settings()
        measured.facts[OURS]["story"] = self._example(point.mode, measured.run.samples)
        self._pace.took(point, time.monotonic() - begun)
        if measured.reasons:
            facts = {
                "point": point.facts(),
                "reasons": [reason.text for reason in measured.reasons],
                OURS: measured.facts[OURS],
            }
            self.folder.refused(point, facts, said)
            self.outcome.void.append((point, measured.reasons[0].text))
            for reason in measured.reasons:
                report(f"  void: {reason.text}")
        else:
            self.folder.good(point, measured.facts, said)
            self.outcome.done.append(point)
            report(f"  {_figures(measured)}")
        left = [*mine, *later]
        if left:
            report(f"  {len(left)} points left, about {spoken(self._pace.left_s(left, point.mode))}")

    def _example(self, mode: str, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """The story of the transfer whose request had the median TTFT; empty where none is told."""
        told = sorted((sample for sample in samples if sample.transfer_id), key=lambda sample: sample.ttft_ms)
        if not told:
            return []
        chosen = told[len(told) // 2].transfer_id
        folders = self.setup.story_dirs if self.setup.router else [StateDir(self._state / mode).story]
        lines = [line for folder in folders if folder.is_dir() for line in read_story(folder, chosen)]
        return sorted(lines, key=lambda line: float(line["t"]))

    def _give_up(self, points: Sequence[Point], reason: str, report: Report) -> None:
        for point in points:
            self.folder.refused(point, {"point": point.facts(), "reasons": [reason]}, "")
            self.outcome.void.append((point, reason))
        if points:
            report(f"  void: {len(points)} points: {reason}")


def _figures(measured: Measured) -> str:
    ours = measured.facts[OURS]

    def ms(name: str) -> str:
        told = ours[name]
        return "-" if told["p50"] is None else f"{told['p50']:.1f} (p99 {told['p99']:.1f}) ms"

    text = f"TTFT {ms('ttft_ms')}, TPOT {ms('tpot_ms')}, ITL {ms('itl_ms')}, {ours['requests_per_s']:.2f} requests/s"
    exposed = ours["transfer"].get("exposed_ms", {}).get("p50")
    return text if exposed is None else f"{text}, exposed transfer {exposed:.1f} ms"
