"""The points of a sweep, and their files: `<mode>_qps<q>_in<in>_out<out>_iter<i>.json`, whole or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError

OURS = "kvferry"
"""The key of everything that we add to what the load generator wrote."""
COUNT = "num"
"""The one setting in which the points of a folder may differ."""
_NAME = re.compile(r"(?P<mode>[a-z-]+)_qps(?P<qps>[0-9.e+-]+)_in(?P<input>\d+)_out(?P<output>\d+)_iter(?P<iter>\d+)")


@dataclass(frozen=True)
class Point:
    """`qps`: requests per second asked for. `iteration`: from 1 up."""

    mode: str
    qps: float
    input_len: int
    output_len: int
    iteration: int

    @property
    def name(self) -> str:
        return f"{self.mode}_qps{self.qps:g}_in{self.input_len}_out{self.output_len}_iter{self.iteration}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def point_named(stem: str) -> Point | None:
    """The point that a file of this name holds, None if it is no point's name."""
    found = _NAME.fullmatch(stem)
    if found is None:
        return None
    try:
        qps = float(found["qps"])
    except ValueError:
        return None
    return Point(found["mode"], qps, int(found["input"]), int(found["output"]), int(found["iter"]))


class Folder:
    """The results of one or more sweeps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def json(self, point: Point) -> Path:
        return self.path / f"{point.name}.json"

    def void(self, point: Point) -> Path:
        return self.path / f"{point.name}.void.json"

    def log(self, point: Point) -> Path:
        return self.path / f"{point.name}.log"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises `ConfigError` where no result could be written, or where results of other settings are: figures and
        verdict take a folder for one sweep. Only how many requests a run has may differ.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--results: {self.path} cannot be made: {error.strerror or error}") from None
        if not os.access(self.path, os.W_OK):
            raise ConfigError(f"--results: {self.path} is not writable", hint="choose another folder")
        for path in sorted(self.path.glob("*.json")):
            there = settings_in(read(path)) if point_named(path.stem) else None
            if there is not None:
                refuse_other(path, {**there, COUNT: None}, {**settings, COUNT: None})

    def good(self, point: Point, facts: Mapping[str, Any], log: str) -> None:
        write_whole(self.log(point), log)
        self.void(point).unlink(missing_ok=True)
        write_whole(self.json(point), json.dumps(facts) + "\n")

    def refused(self, point: Point, facts: Mapping[str, Any], log: str) -> None:
        """A void run: its reasons, and no result. A result of an earlier run of this point stays."""
        write_whole(self.log(point), log)
        write_whole(self.void(point), json.dumps(facts, indent=1) + "\n")

    def done(self, point: Point, settings: Mapping[str, Any]) -> bool:
        """Whether a valid result is there. Raises `ConfigError` if it was made with other settings."""
        path = self.json(point)
        facts = read(path) if path.is_file() else None
        if facts is None or not isinstance(facts.get("ttfts"), list):
            return False
        there = settings_in(facts)
        if there is None:
            raise ConfigError(f"{path} was not written by this tool", hint="choose another folder for --results")
        refuse_other(path, there, settings)
        return True


def settings_in(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How a result was made; None where its file does not tell."""
    ours = (facts or {}).get(OURS)
    settings = ours.get("settings") if isinstance(ours, dict) else None
    return settings if isinstance(settings, dict) else None


def refuse_other(path: Path, there: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for the first setting in which the file differs from this run."""
    for name in sorted(settings.keys() | there.keys()):
        if settings.get(name) != there.get(name):
            made = f"was made with {name} {there.get(name)!r}, this run has {settings.get(name)!r}"
            raise ConfigError(f"{path} {made}", hint="the same settings, or another folder for --results")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of `path`. Raises `ConfigError` for what the system says against that, or in the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def check_writable(option: str, path: Path | None) -> None:
    """Before work whose result goes to `path`. Raises `ConfigError` where it could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder", hint="expected a file to write")
    with writing(path):
        pass
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option}: {path} is not writable", hint="choose another file")


def write_whole(path: Path, text: str | bytes) -> None:
    """A reader sees the old file or the new one, never half of it. Raises `ConfigError` where it can't be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            temporary.write_bytes(text if isinstance(text, bytes) else text.encode(errors="backslashreplace"))
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where it holds none."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def in_order(
    modes: Sequence[str], qps: Sequence[float], inputs: Sequence[int], outputs: Sequence[int], iterations: int
) -> list[Point]:
    """Mode by mode, since each needs a deployment of its own; in it the light load comes first."""
    return [
        Point(mode, rate, input_len, output_len, iteration)
        for mode in modes
        for rate in qps
        for input_len in inputs
        for output_len in outputs
        for iteration in range(1, iterations + 1)
    ]
