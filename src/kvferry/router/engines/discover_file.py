"""Engines from a file, read anew when it changes. YAML, JSON or TOML, by its name's end:

prefill:
  - http://p.example:8100,side_channel=p.example:5600      # as --prefill has it
decode:
  - url: http://d.example:8200                             # or in parts
    side_channel: d.example:5600
    tp: 2
"""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from pathlib import Path
from typing import Any, get_args

from kvferry.errors import ConfigError, unknown_name
from kvferry.router.engines.found import Found
from kvferry.router.engines.pool import Role
from kvferry.router.spec import OPTIONS, EngineSpec, parse_spec

POLL_S = 1.0
Stamp = tuple[int, int, int]


class FileSource:
    """Raises `ConfigError` if it can't be read at start. Replace the file by renaming another over it: one that is read
    half-written is a bad one, until the next look."""

    def __init__(self, where: str, path: str, poll_s: float = POLL_S) -> None:
        self.where = where
        self._path = Path(path)
        self._poll_s = poll_s
        self._stamp = self._now()
        self._read()

    async def look(self) -> Found:
        self._stamp = self._now()
        return self._read()

    async def wait(self) -> None:
        while self._now() == self._stamp:  # noqa: ASYNC110 - a file has no event that every file system knows
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        pass

    def _now(self) -> Stamp:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror or error}") from None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> Found:
        try:
            text = self._path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: not UTF-8: {error.reason}") from None
        return read_engines(str(self._path), _parsed(self._path, text))


def _parsed(path: Path, text: str) -> Any:
    kind = path.suffix.lower()
    try:
        if kind == ".json":
            return json.loads(text)
        if kind == ".toml":
            return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not {kind[1:].upper()}: {error}") from None
    if kind not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: unknown kind {kind!r}", hint="expected .yaml, .yml, .json or .toml")
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{path}: YAML needs PyYAML", hint="pip install pyyaml, or write JSON or TOML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def read_engines(what: str, content: Any) -> Found:
    """Raises `ConfigError` naming file, role and entry."""
    if not isinstance(content, dict):
        raise ConfigError(f"{what}: expected a list of engines for prefill and for decode, got {_kind(content)}")
    roles: tuple[Role, ...] = get_args(Role)
    for name in content:
        if name not in roles:
            raise unknown_name(what, str(name), roles)
    found: Found = {}
    seen: set[str] = set()
    for role in roles:
        entries = content.get(role, [])
        if not isinstance(entries, list):
            raise ConfigError(f"{what}: {role}: expected a list of engines, got {_kind(entries)}")
        found[role] = tuple(_spec(f"{what}: {role}[{index}]", entry) for index, entry in enumerate(entries))
        for spec in found[role]:
            if spec.url in seen:
                raise ConfigError(f"{what}: engine {spec.url} is named twice")
            seen.add(spec.url)
    return found


def _spec(what: str, entry: Any) -> EngineSpec:
    if isinstance(entry, str):
        text = entry
    elif isinstance(entry, dict) and isinstance(entry.get("url"), str):
        options = {name: value for name, value in entry.items() if name != "url"}
        for name, value in options.items():
            if name not in OPTIONS:
                raise unknown_name(what, str(name), (*OPTIONS, "url"))
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise ConfigError(f"{what}: {name}: expected text or a number, got {_kind(value)}")
        text = ",".join([entry["url"], *(f"{name}={value}" for name, value in options.items())])
    else:
        hint = "expected URL[,side_channel=HOST:PORT]..., or an object with `url`"
        raise ConfigError(f"{what}: no engine: {_kind(entry)}", hint=hint)
    try:
        return parse_spec(text)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from None


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
