"""Which engine takes the next leg: pure functions over snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of one engine. `models` None: not known, taken for any."""

    url: str
    ready: bool
    models: frozenset[str] | None = None
    in_flight: int = 0

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models


def eligible(engines: Sequence[Snapshot], model: str | None) -> list[Snapshot]:
    return [engine for engine in engines if engine.ready and engine.serves(model)]


def round_robin(engines: Sequence[Snapshot], turn: int, model: str | None = None) -> Snapshot | None:
    """The `turn`-th of the engines that could take it, counted round; None if there is none."""
    able = eligible(engines, model)
    return able[turn % len(able)] if able else None


def known_models(engines: Sequence[Snapshot]) -> frozenset[str] | None:
    """The names that some ready engine serves; None if one of them did not say."""
    names: frozenset[str] = frozenset()
    for engine in engines:
        if engine.ready:
            if engine.models is None:
                return None
            names |= engine.models
    return names
