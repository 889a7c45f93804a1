"""Staging: KV that lies in many small pieces goes gathered. Pure: which pieces are in which slot.

P gathers pieces into a slot of its registered area, WRITEs it in one piece to its twin in D's area and tells D; D
scatters them and says so, and the two slots are free again. A few pairs of slots are a *lane*, so that gathering, wire
and scattering overlap. Both sides count the pieces of a span alike (`Route.source_pieces`, `Route.target_pieces`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.protocol.table import Table, UnexpectedEvent, transition

SLOTS_PER_LANE = 3


class Slot(Enum):
    """Of P's half of a pair."""

    FREE = auto()
    GATHERING = auto()
    WRITING = auto()
    AWAY = auto()  # D has yet to scatter it


@dataclass(frozen=True)
class Gather:
    """Pieces are being copied into it."""


@dataclass(frozen=True)
class Gathered:
    """They are there."""


@dataclass(frozen=True)
class Written:
    """The WRITE is complete."""


@dataclass(frozen=True)
class Unstaged:
    """D's word."""


SLOT_TABLE: Table = {
    (Slot.FREE, Gather): (Slot.GATHERING, ""),
    (Slot.GATHERING, Gathered): (Slot.WRITING, "write"),
    (Slot.WRITING, Written): (Slot.AWAY, "tell"),
    (Slot.AWAY, Unstaged): (Slot.FREE, ""),
}


@dataclass(frozen=True)
class Load:
    """Pieces [first, first + count) of the span, in one slot from its beginning on."""

    slot: int
    first: int
    count: int


class Lane:
    """P's side of one span: `pieces` in all, `per_slot` of them at most in each of `slots` slots."""

    def __init__(self, pieces: int, per_slot: int, slots: int) -> None:
        self._pieces, self._per_slot = pieces, per_slot
        self._states = [Slot.FREE] * slots
        self._loads = [Load(index, 0, 0) for index in range(slots)]
        self._free = deque(range(slots))
        self._taken = self._unstaged = 0

    @property
    def loads(self) -> int:
        """How many slots it fills in all."""
        return -(-self._pieces // self._per_slot)

    @property
    def done(self) -> bool:
        """D has scattered everything."""
        return self._unstaged == self._pieces

    def take(self) -> Load | None:
        """What to gather next, counted as taken; None: all is taken, or no slot is free."""
        if self._taken == self._pieces or not self._free:
            return None
        slot = self._free.popleft()
        count = min(self._per_slot, self._pieces - self._taken)
        load = self._loads[slot] = Load(slot, self._taken, count)
        self._taken += count
        self._apply(slot, Gather())
        return load

    def gathered(self, slot: int) -> Load:
        return self._apply(slot, Gathered())

    def written(self, slot: int) -> Load:
        return self._apply(slot, Written())

    def unstaged(self, slot: int) -> Load:
        """Raises `UnexpectedEvent` for a slot that is not away: it is D who says so."""
        if not 0 <= slot < len(self._states):
            raise UnexpectedEvent(f"there is no slot {slot} in this lane of {len(self._states)}")
        load = self._apply(slot, Unstaged())
        self._unstaged += load.count
        self._free.append(slot)
        return load

    def _apply(self, slot: int, event: object) -> Load:
        target, _ = transition(SLOT_TABLE, "slot", self._states[slot], event)
        assert isinstance(target, Slot)
        self._states[slot] = target
        return self._loads[slot]


class Arrivals:
    """D's side of one span: which of its pieces have come. `slots`: how many D lent."""

    def __init__(self, pieces: int, per_slot: int, slots: int) -> None:
        self._pieces, self._per_slot, self._slots = pieces, per_slot, slots
        self._due = set(range(0, pieces, per_slot))

    @property
    def done(self) -> bool:
        return not self._due

    def take(self, load: Load) -> None:
        """Raises `UnexpectedEvent` for pieces that this span has not, or that have come before."""
        whole = min(self._per_slot, self._pieces - load.first)
        if not 0 <= load.slot < self._slots or load.first not in self._due or load.count != whole:
            text = f"pieces [{load.first}, {load.first + load.count}) in slot {load.slot} are none of those to come"
            raise UnexpectedEvent(text)
        self._due.remove(load.first)
