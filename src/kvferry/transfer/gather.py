"""P's side of staging: spans that are gathered into slots, written there, and scattered by D.

Owned by the core's thread. One `StagedSpan` per span; `Posts` keeps it among its posts and drives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol import messages as wire
from kvferry.protocol.plan import U64, Plan, Route
from kvferry.protocol.staging import SLOTS_PER_LANE, Lane, Load
from kvferry.protocol.stream import Span
from kvferry.protocol.table import UnexpectedEvent
from kvferry.transfer.areas import Slots
from kvferry.transfer.commands import Moment
from kvferry.transfer.fabric import Fabric, Handle, has_ended
from kvferry.transfer.mover import Mover
from kvferry.transfer.peers import Peer

WORTH = 0.8
"""Staging must promise at least this much of what the scattered WRITE takes: it needs D's time as well."""

Send = Callable[[str, wire.Message], object]


@dataclass
class StagedSpan:
    """`pieces`: where each lies on P. `refused`: D has no slots to spare. Times are of the core's clock."""

    stage_id: int
    peer: Peer
    pieces: U64
    piece_bytes: int
    mine: tuple[int, ...]
    lane: Lane
    theirs: tuple[int, ...] = ()  # none yet: slots are gathered, and wait in `ready`
    ready: list[Load] = field(default_factory=list)
    refused: bool = False
    gathering: dict[int, tuple[Load, Moment]] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)  # of each slot's WRITE, posted again and again
    writing: set[int] = field(default_factory=set)  # slots
    gather_s: float = 0.0
    post_s: float = 0.0
    stopped: bool = False
    closed: bool = False


class Gatherer:
    """`send`: to a peer's channel. `clock`: seconds."""

    def __init__(self, slots: Slots, mover: Mover, fabric: Fabric, send: Send, clock: Callable[[], float]) -> None:
        self._slots, self._mover, self._fabric = slots, mover, fabric
        self._send, self._clock = send, clock
        self._open: dict[tuple[str, int], StagedSpan] = {}
        self._numbers = itertools.count(1)

    def copies(self, plan: Plan, route: Route) -> int:
        """How many slots that plan would fill; 0: it can't be staged."""
        piece = route.piece_bytes
        per_slot = self._slots.slot_bytes // piece if piece else 0
        return -(-plan.total_bytes // (per_slot * piece)) if per_slot else 0

    def ask(
        self, peer: Peer, register: wire.Register, span: Span, route: Route, block_ids: tuple[int, ...]
    ) -> StagedSpan | None:
        """Ask D for slots; None: there are none here. `block_ids`: of the span's first token on."""
        mine = self._slots.take(SLOTS_PER_LANE)
        if not mine:
            return None
        pieces = route.source_pieces(block_ids, span)
        per_slot = self._slots.slot_bytes // route.piece_bytes
        lane = Lane(len(pieces), per_slot, len(mine))
        made = StagedSpan(next(self._numbers), peer, pieces, route.piece_bytes, mine, lane)
        self._open[peer.key, made.stage_id] = made
        question = wire.StageAsk(
            stage_id=made.stage_id,
            reg_id=register.reg_id,
            start_token=span.start_token,
            end_token=span.end_token,
            first_plane=span.first_plane,
            end_plane=span.end_plane,
            slots=len(mine),
            slot_bytes=self._slots.slot_bytes,
        )
        self._send(peer.key, question)
        return made

    def lent(self, key: str, answer: wire.StageLent) -> None:
        """Raises `UnexpectedEvent` if the answer is to nothing, or makes no sense."""
        span = self._open.get((key, answer.stage_id))
        if span is None:
            return  # given up meanwhile
        if span.theirs or span.refused or len(answer.slots) not in (0, len(span.mine)):
            raise UnexpectedEvent(f"StageLent of {len(answer.slots)} slots for stage {answer.stage_id}")
        span.theirs, span.refused = answer.slots, not answer.slots

    def unstaged(self, key: str, message: wire.Unstaged) -> None:
        """Raises `UnexpectedEvent` for a slot that is not away."""
        span = self._open.get((key, message.stage_id))
        if span is not None:
            span.lane.unstaged(message.slot)

    def drive(self, span: StagedSpan) -> bool:
        """Gather, write and tell as far as that goes now; whether all has been scattered. Raises `FabricError`."""
        lane = span.lane
        while span.ready and span.theirs and not span.stopped:
            self._gathered(span, lane, span.ready.pop(0))
        for slot, (gathering, moment) in list(span.gathering.items()):
            if not span.stopped and moment.query():
                del span.gathering[slot]
                self._gathered(span, lane, gathering)
        for slot in sorted(span.writing):
            if not span.stopped:  # telling D may find that it is gone
                self._check(span, lane, slot)
        while not span.stopped and (load := lane.take()) is not None:
            began = self._clock()
            pieces = span.pieces[load.first : load.first + load.count]
            pending = self._mover.gather(pieces, span.piece_bytes, span.mine[load.slot])
            span.gather_s += self._clock() - began
            if pending is not None:
                span.gathering[load.slot] = (load, pending)
            else:
                self._gathered(span, lane, load)
        return lane.done

    def _gathered(self, span: StagedSpan, lane: Lane, load: Load) -> None:
        if not span.theirs:
            span.ready.append(load)
        else:
            self._write(span, lane, load)

    def _write(self, span: StagedSpan, lane: Lane, load: Load) -> None:
        began = self._clock()
        lane.gathered(load.slot)
        if load.slot in span.handles:  # the last load may be shorter: what lay behind it goes once more
            self._fabric.repost(span.handles[load.slot])
        else:
            self._post(span, load)
        span.writing.add(load.slot)
        span.post_s += self._clock() - began
        self._check(span, lane, load.slot)  # over shared memory it is complete by now

    def _post(self, span: StagedSpan, load: Load) -> None:
        mine, theirs, nbytes = (
            np.array([value], dtype=np.uint64)
            for value in (span.mine[load.slot], span.theirs[load.slot], load.count * span.piece_bytes)
        )
        peer = span.peer
        handle = self._fabric.post("WRITE", peer.agent, mine, theirs, nbytes, peer.layout.device)
        span.handles[load.slot] = handle

    def _check(self, span: StagedSpan, lane: Lane, slot: int) -> None:
        if not self._fabric.check(span.handles[slot]):
            return
        span.writing.remove(slot)
        load = lane.written(slot)
        told = wire.Staged(stage_id=span.stage_id, slot=slot, first=load.first, count=load.count)
        self._send(span.peer.key, told)

    def stop(self, span: StagedSpan) -> None:
        """Its peer was given up: nothing more is gathered or posted. Its slots stay until what is in flight has
        `ended`."""
        span.stopped = True
        self._open.pop((span.peer.key, span.stage_id), None)

    def ended(self, span: StagedSpan) -> bool:
        """Whether nothing of a stopped span is in flight any more, well or not."""
        span.writing = {slot for slot in span.writing if not has_ended(self._fabric, span.handles[slot])}
        return not span.writing

    def close(self, span: StagedSpan) -> None:
        """It is over, or D has no slots. Idempotent."""
        if span.closed:
            return
        self.stop(span)
        span.closed = True
        for handle in span.handles.values():
            self._fabric.release(handle)
        self._slots.give(span.mine)
