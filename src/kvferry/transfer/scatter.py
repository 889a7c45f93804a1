"""D's side of staging: slots lent to those who send to us, and their pieces copied to the blocks they are for.

Owned by the core's thread. A slot is lent for one span. It comes back when all pieces of the span have arrived, or when
its registration is over: it is fenced as the blocks are, since WRITEs of a lost sender may be under way to either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.ids import RegistrationId
from kvferry.protocol import messages as wire
from kvferry.protocol.plan import U64, Route
from kvferry.protocol.staging import SLOTS_PER_LANE, Arrivals, Load
from kvferry.protocol.stream import Span
from kvferry.protocol.table import UnexpectedEvent
from kvferry.transfer.areas import Slots
from kvferry.transfer.commands import Moment
from kvferry.transfer.mover import Mover
from kvferry.transfer.peers import Peer

Send = Callable[[str, wire.Message], object]
RegisterOf = Callable[[RegistrationId, str], wire.Register | None]


@dataclass(eq=False)
class _Stage:
    stage_id: int
    peer: Peer
    reg_id: RegistrationId
    pieces: U64  # where each belongs
    piece_bytes: int
    slots: tuple[int, ...]
    arrivals: Arrivals
    copying: dict[int, Moment] = field(default_factory=dict)


class Scatterer:
    """`register_of`: of a registration with that peer that is not over."""

    def __init__(
        self,
        slots: Slots,
        mover: Mover,
        register_of: RegisterOf,
        send: Send,
    ) -> None:
        self._slots, self._mover, self._register_of = slots, mover, register_of
        self._send = send
        self._open: dict[tuple[str, int], _Stage] = {}
        self._lost: list[_Stage] = []

    def __len__(self) -> int:
        return len(self._open) + len(self._lost)

    def asked(self, peer: Peer, ask: wire.StageAsk, route: Route | None) -> None:
        """Raises `PlanError` or `UnexpectedEvent` for a span that is none of the registration's."""
        self.tidy()
        register = self._register_of(ask.reg_id, peer.key)
        if register is None or route is None:
            self._send(peer.key, wire.StageLent(stage_id=ask.stage_id, slots=()))
            return
        if (peer.key, ask.stage_id) in self._open:
            raise UnexpectedEvent(f"StageAsk for stage {ask.stage_id}, which is open")
        if not register.start_token <= ask.start_token < ask.end_token <= register.end_token:
            text = f"StageAsk for tokens [{ask.start_token}, {ask.end_token}), of registration {ask.reg_id}"
            raise UnexpectedEvent(text)
        dst = route.dst
        blocks = register.block_ids[ask.start_token // dst.block_size - register.start_token // dst.block_size :]
        span = Span(ask.start_token, ask.end_token, ask.first_plane, ask.end_plane)
        pieces, nbytes = route.target_pieces(blocks, span), route.piece_bytes
        per_slot = ask.slot_bytes // nbytes if nbytes and ask.slot_bytes <= self._slots.slot_bytes else 0
        slots: tuple[int, ...] = ()
        if per_slot and len(pieces) and ask.slots <= SLOTS_PER_LANE:
            slots = self._slots.take(ask.slots)
        if slots:
            arrivals = Arrivals(len(pieces), per_slot, len(slots))
            stage = _Stage(ask.stage_id, peer, ask.reg_id, pieces, nbytes, slots, arrivals)
            self._open[peer.key, ask.stage_id] = stage
        self._send(peer.key, wire.StageLent(stage_id=ask.stage_id, slots=slots))

    def staged(self, peer: Peer, message: wire.Staged) -> None:
        """Raises `UnexpectedEvent` for what is not to come."""
        stage = self._open.get((peer.key, message.stage_id))
        if stage is None:
            raise UnexpectedEvent(f"Staged for stage {message.stage_id}, which is not open")
        stage.arrivals.take(Load(message.slot, message.first, message.count))
        moment = None
        if self._register_of(stage.reg_id, peer.key) is not None:  # else the blocks are no longer ours to write
            pieces = stage.pieces[message.first : message.first + message.count]
            moment = self._mover.scatter(stage.slots[message.slot], pieces, stage.piece_bytes)
        if moment is None:
            self._unstaged(stage, message.slot)
        else:
            stage.copying[message.slot] = moment

    def drive(self) -> None:
        """See which copies are over."""
        for stage in [stage for stage in self._open.values() if stage.copying]:
            for slot in [slot for slot, moment in stage.copying.items() if moment.query()]:
                del stage.copying[slot]
                self._unstaged(stage, slot)

    def _unstaged(self, stage: _Stage, slot: int) -> None:
        if stage.arrivals.done and not stage.copying:
            self._close(stage)
        self._send(stage.peer.key, wire.Unstaged(stage_id=stage.stage_id, slot=slot))

    def lost(self, key: str) -> None:
        """The peer is cut off: nothing more is scattered. Its numbers may come again, on a new connection."""
        for where in [where for where in self._open if where[0] == key]:
            self._lost.append(self._open.pop(where))

    def tidy(self) -> None:
        """Take back what was lent for registrations that are over: P writes no more."""
        for stage in [*self._open.values(), *self._lost]:
            copying = any(not moment.query() for moment in stage.copying.values())
            if self._register_of(stage.reg_id, stage.peer.key) is None and not copying:
                self._close(stage)

    def close(self) -> None:
        """Nothing can reach our agent any more, or it is not wanted."""
        for stage in [*self._open.values(), *self._lost]:
            self._close(stage)

    def _close(self, stage: _Stage) -> None:
        if stage in self._lost:
            self._lost.remove(stage)
        else:
            del self._open[stage.peer.key, stage.stage_id]
        self._slots.give(stage.slots)
