"""D's side of staging: slots lent to those who send to us, and their pieces copied to the blocks they are for.

Owned by the core's thread. A slot is lent for one span. It comes back when all pieces of the span have arrived, or when
its registration is over: it is fenced as the blocks are, since WRITEs of a lost sender may be under way to either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import FabricError
from kvferry.ids import RegistrationId
from kvferry.protocol import messages as wire
from kvferry.protocol.plan import U64, Route
from kvferry.protocol.staging import SLOTS_PER_LANE, Arrivals, Load
from kvferry.protocol.stream import Span
from kvferry.protocol.table import UnexpectedEvent
from kvferry.transfer.areas import Slots
from kvferry.transfer.commands import Moment
from kvferry.transfer.fabric import Fabric, Handle, PeerName
from kvferry.transfer.mover import Mover
from kvferry.transfer.peers import Peer

Send = Callable[[str, wire.Message], None]
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
    handles: dict[int, Handle] = field(default_factory=dict)  # of each slot's READ, posted again and again
    reading: dict[int, Load] = field(default_factory=dict)
    copying: dict[int, Moment] = field(default_factory=dict)


class Scatterer:
    """`register_of`: of a registration with that peer that is not over."""

    def __init__(
        self,
        slots: Slots,
        mover: Mover,
        fabric: Fabric,
        register_of: RegisterOf,
        send: Send,
    ) -> None:
        self._slots, self._mover, self._fabric, self._register_of = slots, mover, fabric, register_of
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
            return self._send(peer.key, wire.StageLent(stage_id=ask.stage_id, slots=()))
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
        return self._send(peer.key, wire.StageLent(stage_id=ask.stage_id, slots=slots))

    def staged(self, peer: Peer, message: wire.Staged) -> None:
        """Raises `UnexpectedEvent` for what is not to come, `FabricError` if it can't be read."""
        stage = self._open.get((peer.key, message.stage_id))
        if stage is None:
            raise UnexpectedEvent(f"Staged for stage {message.stage_id}, which is not open")
        load = Load(message.slot, message.first, message.count)
        stage.arrivals.take(load)
        if message.source is None:
            return self._scatter(stage, load)
        if load.slot in stage.handles:
            self._fabric.repost(stage.handles[load.slot])
        else:
            stage.handles[load.slot] = self._read(stage, load, message.source)
        stage.reading[load.slot] = load
        return self._drive(stage)  # over shared memory it is complete by now

    def _read(self, stage: _Stage, load: Load, source: int) -> Handle:
        mine, theirs, nbytes = (
            np.array([value], dtype=np.uint64)
            for value in (stage.slots[load.slot], source, load.count * stage.piece_bytes)
        )
        return self._fabric.post("READ", stage.peer.agent, mine, theirs, nbytes, stage.peer.layout.device)

    def _scatter(self, stage: _Stage, load: Load) -> None:
        moment = None
        if self._register_of(stage.reg_id, stage.peer.key) is not None:  # else the blocks are no longer ours to write
            pieces = stage.pieces[load.first : load.first + load.count]
            moment = self._mover.scatter(stage.slots[load.slot], pieces, stage.piece_bytes)
        if moment is None:
            self._unstaged(stage, load.slot)
        else:
            stage.copying[load.slot] = moment

    def drive(self, peer: str) -> None:
        """See which READs and copies are over. Raises `FabricError`."""
        for where in [where for where in self._open if where[0] == peer]:
            if where in self._open:
                self._drive(self._open[where])

    def peers(self) -> set[str]:
        """Who has something under way here."""
        return {key for (key, _), stage in self._open.items() if stage.reading or stage.copying}

    def _drive(self, stage: _Stage) -> None:
        for slot in [slot for slot in stage.reading if self._fabric.check(stage.handles[slot])]:
            self._scatter(stage, stage.reading.pop(slot))
        for slot in [slot for slot, moment in stage.copying.items() if moment.query()]:
            del stage.copying[slot]
            self._unstaged(stage, slot)

    def _unstaged(self, stage: _Stage, slot: int) -> None:
        if stage.arrivals.done and not stage.reading and not stage.copying:
            self._close(stage)
        self._send(stage.peer.key, wire.Unstaged(stage_id=stage.stage_id, slot=slot))

    def lost(self, key: str) -> None:
        """The peer is cut off: nothing more is read or scattered. Its numbers may come again, on a new connection."""
        for where in [where for where in self._open if where[0] == key]:
            self._lost.append(self._open.pop(where))

    def tidy(self) -> list[PeerName]:
        """Take back what was lent for registrations that are over: P writes no more, and our READs have ended. Returns
        the agents of lost peers whose slots came back."""
        agents = []
        for stage in [*self._open.values(), *self._lost]:
            if self._register_of(stage.reg_id, stage.peer.key) is None and self._at_rest(stage):
                if stage in self._lost:
                    agents.append(stage.peer.agent)
                self._close(stage)
        return agents

    def reach(self, agent: PeerName) -> bool:
        """READs from that agent, whose peer was given up, are in flight."""
        return any(stage.peer.agent == agent and stage.reading for stage in self._lost)

    def _at_rest(self, stage: _Stage) -> bool:
        for slot in list(stage.reading):
            try:
                over = self._fabric.check(stage.handles[slot])
            except FabricError:
                over = True
            if over:
                del stage.reading[slot]
        stage.copying = {slot: moment for slot, moment in stage.copying.items() if not moment.query()}
        return not stage.reading and not stage.copying

    def close(self) -> None:
        """Nothing can reach our agent any more, or it is not wanted."""
        for stage in [*self._open.values(), *self._lost]:
            self._close(stage)

    def _close(self, stage: _Stage) -> None:
        if stage in self._lost:
            self._lost.remove(stage)
        else:
            del self._open[stage.peer.key, stage.stage_id]
        for handle in stage.handles.values():
            self._fabric.release(handle)
        self._slots.give(stage.slots)
