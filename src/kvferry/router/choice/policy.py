"""Which engine takes the next leg: pure functions over snapshots.

A load is a number of tokens: of a prefill engine those that it has yet to compute, of a decode engine those that its
running requests hold, prompt and output, each divided by the engine's data-parallel ranks. `turn` counts the choices
made before: the same snapshots, ask and turn give the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from kvferry.router.choice.ask import Ask

Policy = Literal["round_robin", "random", "least_loaded", "power_of_two", "prefix_aware", "session"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MATCHING: frozenset[Policy] = frozenset(("prefix_aware", "session"))
"""Those that look at `Snapshot.matched`."""
TOPOLOGY_FACTOR = 1.5
"""An engine with the wanted topology label is left when its load is above so many times that of the best other one."""
_MASK = (1 << 64) - 1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of one engine. `models` None: not known, taken for any.

    `tokens`: its load; `full`: it would wait for blocks; `matched`: how many leading tokens of the asked prompt its
    cache is thought to hold; `sticky`: the ask's session was here last.
    """

    url: str
    ready: bool
    models: frozenset[str] | None = None
    in_flight: int = 0
    tokens: int = 0
    full: bool = False
    matched: int = 0
    sticky: bool = False
    topology: str = ""

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models


def eligible(engines: Sequence[Snapshot], ask: Ask) -> list[Snapshot]:
    """Ready, not to be avoided, and serving the model."""
    return [e for e in engines if e.ready and e.url not in ask.avoid and e.serves(ask.model)]


def choose(policy: Policy, engines: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot | None:
    """One that can take it; None only if there is none."""
    able = eligible(engines, ask)
    if not able:
        return None
    rule = _RULES[policy]
    near = [engine for engine in able if ask.topology and engine.topology == ask.topology]
    far = [engine for engine in able if engine not in near]
    if not near or not far or (policy == "session" and any(engine.sticky for engine in able)):
        return rule(able, ask, turn)
    first, other = rule(near, ask, turn), rule(far, ask, turn)
    return other if first.tokens > TOPOLOGY_FACTOR * (other.tokens + ask.tokens) else first


def round_robin(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    return able[turn % len(able)]


def draw(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    return able[_mixed(turn) % len(able)]


def least_loaded(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    return _least(able, lambda engine: engine.tokens, turn)


def power_of_two(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    """The less loaded of two that are drawn: routers that don't know of each other don't all take the same one."""
    if len(able) < 2:
        return able[0]
    first = _mixed(turn) % len(able)
    second = (first + 1 + _mixed(turn + (1 << 32)) % (len(able) - 1)) % len(able)
    return _least([able[first], able[second]], lambda engine: engine.tokens, 0)


def prefix_aware(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    """Fewest tokens to go: the engine's load and what it would have to compute of this prompt. An engine that holds a
    prefix is taken until its load is above another's by as much as the prefix saves."""
    return _least(able, lambda engine: engine.tokens + max(0, ask.tokens - engine.matched), turn)


def session(able: Sequence[Snapshot], ask: Ask, turn: int) -> Snapshot:
    """Where the session was last, else as `prefix_aware`."""
    last = [engine for engine in able if engine.sticky] if ask.session else []
    return prefix_aware(last or able, ask, turn)


def _least(engines: Sequence[Snapshot], load: Callable[[Snapshot], int], turn: int) -> Snapshot:
    """Of those with room, if there are any. Equal ones take turns."""
    start = turn % len(engines)
    return min([*engines[start:], *engines[:start]], key=lambda engine: (engine.full, load(engine), engine.in_flight))


def _mixed(number: int) -> int:
    """splitmix64: evenly spread, and the same in every process."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


_RULES: dict[Policy, Callable[[Sequence[Snapshot], Ask, int], Snapshot]] = {
    "round_robin": round_robin,
    "random": draw,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
    "session": session,
}


def known_models(engines: Sequence[tuple[bool, frozenset[str] | None]]) -> frozenset[str] | None:
    """The names that some ready engine serves; None if one of them did not say. `engines`: (ready, names)."""
    names: frozenset[str] = frozenset()
    for ready, told in engines:
        if ready:
            if told is None:
                return None
            names |= told
    return names
