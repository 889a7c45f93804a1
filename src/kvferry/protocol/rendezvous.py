"""Prefill side: where a destination meets its source, in either order. Pure: events in, instructions out.

A *source* is one request on this P rank; a *leg* is one registration by one D rank. The source is released, once,
when all its legs have ended, or when its lease lapses with no leg at work. Nothing is released while a WRITE or a
granted READ may still touch its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol.lease import Deadlines
from kvferry.protocol.messages import Begin, Failed, Grant, Landed, Message, Mode, Register
from kvferry.protocol.table import Table, transition

PeerKey = str
LegKey = tuple[PeerKey, RegistrationId]


class Leg(Enum):
    HELD = auto()  # waits for the source
    WRITING = auto()  # push: WRITEs are posted or about to be
    GRANTED = auto()  # pull: D may read
    REVOKED = auto()  # pull: D was told that it failed, but may read still
    FENCING = auto()  # ended, but its WRITEs have not: the outcome waits for them
    ENDED = auto()


class Source(Enum):
    UNSEEN = auto()  # registrations came first
    COMPUTING = auto()  # the engine knows the request
    READY = auto()  # all KV computed; blocks known


@dataclass(frozen=True)
class StartPush:
    """The source is ready and this leg's WRITEs may go."""


@dataclass(frozen=True)
class StartPull:
    """The source is ready and D may read it."""


@dataclass(frozen=True)
class Nothing:
    """The source is ready and this leg wants no bytes."""


@dataclass(frozen=True)
class Cancelled:
    """D asked to stop."""


@dataclass(frozen=True)
class SourceLost:
    """The source ended without serving this leg."""


@dataclass(frozen=True)
class PeerGone:
    """The D rank is dead or cut off."""


@dataclass(frozen=True)
class WriteDone:
    """Every WRITE of the leg completed."""


@dataclass(frozen=True)
class WriteFailed:
    """The WRITEs ended, at least one badly, and none is in flight any more."""


@dataclass(frozen=True)
class ReadOk:
    """D says that its READs completed."""


@dataclass(frozen=True)
class ReadBad:
    """D says that its READs ended badly."""


LEG_TABLE: Table = {
    (Leg.HELD, StartPush): (Leg.WRITING, "write"),
    (Leg.HELD, StartPull): (Leg.GRANTED, "grant"),
    (Leg.HELD, Nothing): (Leg.ENDED, "landed"),
    (Leg.HELD, Cancelled): (Leg.ENDED, "failed"),
    (Leg.HELD, SourceLost): (Leg.ENDED, "failed"),
    (Leg.HELD, PeerGone): (Leg.ENDED, ""),
    (Leg.WRITING, WriteDone): (Leg.ENDED, "landed"),
    (Leg.WRITING, WriteFailed): (Leg.ENDED, "failed"),
    (Leg.WRITING, Cancelled): (Leg.FENCING, ""),
    (Leg.WRITING, SourceLost): (Leg.FENCING, ""),
    (Leg.WRITING, PeerGone): (Leg.FENCING, ""),
    (Leg.FENCING, WriteDone): (Leg.ENDED, "failed"),
    (Leg.FENCING, WriteFailed): (Leg.ENDED, "failed"),
    (Leg.FENCING, Cancelled): (Leg.FENCING, ""),
    (Leg.FENCING, SourceLost): (Leg.FENCING, ""),
    (Leg.FENCING, PeerGone): (Leg.FENCING, ""),
    (Leg.GRANTED, ReadOk): (Leg.ENDED, "landed"),
    (Leg.GRANTED, ReadBad): (Leg.ENDED, "failed"),
    (Leg.GRANTED, Cancelled): (Leg.ENDED, "failed"),
    (Leg.GRANTED, SourceLost): (Leg.REVOKED, "failed"),
    (Leg.GRANTED, PeerGone): (Leg.ENDED, ""),
    (Leg.REVOKED, ReadOk): (Leg.ENDED, ""),
    (Leg.REVOKED, ReadBad): (Leg.ENDED, ""),
    (Leg.REVOKED, Cancelled): (Leg.ENDED, ""),
    (Leg.REVOKED, SourceLost): (Leg.REVOKED, ""),
    (Leg.REVOKED, PeerGone): (Leg.ENDED, ""),
}


@dataclass(frozen=True)
class Send:
    peer: PeerKey
    message: Message


@dataclass(frozen=True)
class StartWrite:
    """Plan and post: tokens [register.start_token, register.end_token) of the source into the leg's blocks."""

    peer: PeerKey
    register: Register
    block_ids: tuple[int, ...]  # the source's blocks from logical block 0 on


@dataclass(frozen=True)
class Release:
    """The engine may free the request's blocks. Exactly one per source that reached READY."""

    transfer_id: TransferId
    ok: bool
    code: str
    reason: str


@dataclass(frozen=True)
class Note:
    """One line for the story."""

    transfer_id: TransferId
    event: str
    reason: str = ""


Instruction = Send | StartWrite | Release | Note


@dataclass
class _Leg:
    peer: PeerKey
    register: Register
    state: Leg = Leg.HELD
    code: str = "cancelled"
    reason: str = ""
    peer_gone: bool = False


@dataclass
class _Source:
    transfer_id: TransferId
    state: Source = Source.UNSEEN
    mode: Mode | None = None
    fan_out: int = 1
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    legs: dict[LegKey, _Leg] = field(default_factory=dict)
    waiting: set[PeerKey] = field(default_factory=set)  # D ranks whose request queues
    past: set[LegKey] = field(default_factory=set)  # legs that have ended
    ended_ok: int = 0
    ended_bad: int = 0
    legs_stated: int = 0
    expected: int = 0  # legs in all: stated by the decode side, times the request's fan-out
    doomed: bool = False
    last_failure: tuple[str, str] = ("", "")

    def at_work(self) -> bool:
        return any(leg.state is not Leg.HELD for leg in self.legs.values())


@dataclass(frozen=True)
class Ending:
    ok: bool
    code: str
    reason: str


class Rendezvous:
    """All sources of one P rank. Owned by one thread; `now` is that thread's monotonic clock in seconds.

    `lease_s`: how long a READY source waits for a registration. `patience_s`: the same while a
    living D rank says that its request queues. `unseen_s`: how long a registration waits for its request to show up.
    `remember`: how many ended transfers are kept to refuse late comers by name.
    """

    def __init__(self, *, lease_s: float, unseen_s: float, patience_s: float = 300.0, remember: int = 10_000) -> None:
        self.lease_s, self.patience_s = lease_s, patience_s
        self.unseen_s = unseen_s
        self._remember = remember
        self._sources: dict[TransferId, _Source] = {}
        self._by_leg: dict[LegKey, TransferId] = {}
        self._ended: OrderedDict[TransferId, Ending] = OrderedDict()
        self._deadlines: Deadlines[TransferId] = Deadlines()

    # -- the engine's side ------------------------------------------------------------------------------------------

    def expect(self, transfer_id: TransferId, mode: Mode, fan_out: int, now: float) -> list[Instruction]:
        """The engine has taken in the request; its KV will come."""
        source = self._sources.get(transfer_id)
        if transfer_id in self._ended or (source is not None and source.state is not Source.UNSEEN):
            return [Note(transfer_id, "duplicate", "transfer id already used on this engine")]
        if source is None:
            source = self._sources[transfer_id] = _Source(transfer_id)
        source.state = Source.COMPUTING
        source.mode, source.fan_out = mode, fan_out
        source.expected = source.legs_stated * fan_out
        self._deadlines.clear(transfer_id)
        out: list[Instruction] = [Note(transfer_id, "queued")]
        for leg in list(source.legs.values()):
            out += self._check_mode(source, leg, now)
        return out

    def ready(
        self, transfer_id: TransferId, block_ids: tuple[int, ...], num_tokens: int, now: float
    ) -> list[Instruction]:
        """All KV of tokens [0, num_tokens) is in `block_ids` (logical block 0 first), and stays until `Release`."""
        source = self._sources.get(transfer_id)
        if source is None or source.state is not Source.COMPUTING:
            ending = self._ended.get(transfer_id, Ending(False, "unknown_transfer", "not expected here"))
            return [Release(transfer_id, False, ending.code, ending.reason)]
        source.state = Source.READY
        source.block_ids, source.num_tokens = block_ids, num_tokens
        out: list[Instruction] = [Note(transfer_id, "computed")]
        for leg in list(source.legs.values()):
            out += self._start(source, leg, now)
        return out + self._settle(source, now)

    def abort(self, transfer_id: TransferId, code: str, reason: str, now: float) -> list[Instruction]:
        """The request ended without KV, or nobody will come for it (`Abandon`). Idempotent."""
        source = self._sources.get(transfer_id)
        if source is None:
            self._bury(transfer_id, Ending(False, code, reason))
            return []
        out: list[Instruction] = []
        source.last_failure = (code, reason)
        source.doomed = True
        for leg in list(source.legs.values()):
            out += self._apply(source, leg, SourceLost(), now, code, reason)
        if source.state is Source.READY:
            return out + self._settle(source, now)
        self._forget(source, Ending(False, code, reason))
        return [*out, Note(transfer_id, "failed", reason)]

    # -- the decode rank's side -------------------------------------------------------------------------------------

    def register(self, peer: PeerKey, message: Register, now: float) -> list[Instruction]:
        key = (peer, message.reg_id)
        transfer_id = message.transfer_id
        if key in self._by_leg:
            return []  # re-sent: the first one stands
        ending = self._ended.get(transfer_id)
        if ending is not None:
            if ending.ok and message.start_token == message.end_token:
                return [Send(peer, Landed(reg_id=message.reg_id, nbytes=0, descriptors=0))]
            why = ending.reason or "it has been served"
            text = f"unknown or expired transfer {transfer_id}: {why}"
            return [Send(peer, Failed(reg_id=message.reg_id, code=ending.code or "expired_transfer", reason=text))]
        source = self._sources.get(transfer_id)
        if source is None:
            source = self._sources[transfer_id] = _Source(transfer_id)
            self._deadlines.set(transfer_id, now + self.unseen_s)
        if key in source.past:
            return []  # re-sent, late
        leg = source.legs[key] = _Leg(peer, message)
        self._by_leg[key] = transfer_id
        source.legs_stated = max(source.legs_stated, message.legs)
        source.expected = source.legs_stated * source.fan_out
        out: list[Instruction] = [Note(transfer_id, "met" if source.state is Source.READY else "held")]
        if source.state is not Source.UNSEEN:
            out += self._check_mode(source, leg, now)
        if source.state is Source.READY and leg.state is Leg.HELD:
            out += self._start(source, leg, now)
        return out + self._settle(source, now)

    def waiting(self, peer: PeerKey, transfer_id: TransferId, now: float) -> list[Instruction]:
        """D's request has no blocks yet. Nothing for transfers that have ended, or that nobody has heard of."""
        source = self._sources.get(transfer_id)
        if source is None or peer in source.waiting:
            return []
        source.waiting.add(peer)
        return [Note(transfer_id, "waits"), *self._settle(source, now)]

    def cancel(self, peer: PeerKey, reg_id: RegistrationId, reason: str, now: float) -> list[Instruction]:
        return self._leg_event((peer, reg_id), Cancelled(), now, "cancelled", reason)

    def fetched(self, peer: PeerKey, reg_id: RegistrationId, ok: bool, now: float) -> list[Instruction]:
        event = ReadOk() if ok else ReadBad()
        return self._leg_event((peer, reg_id), event, now, "read_failed", "the decode side's READ failed")

    def peer_gone(self, peer: PeerKey, reason: str, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for key in [key for key in self._by_leg if key[0] == peer]:
            source = self._sources[self._by_leg[key]]
            leg = source.legs[key]
            leg.peer_gone = True
            out += self._apply(source, leg, PeerGone(), now, "peer_gone", reason)
            out += self._settle(source, now)
        for source in [source for source in self._sources.values() if peer in source.waiting]:
            source.waiting.discard(peer)
            out += self._settle(source, now)
        return out

    # -- the fabric's side ------------------------------------------------------------------------------------------

    def wrote(
        self, peer: PeerKey, reg_id: RegistrationId, now: float, *, nbytes: int, descriptors: int
    ) -> list[Instruction]:
        return self._leg_event((peer, reg_id), WriteDone(), now, "", "", nbytes, descriptors)

    def write_failed(
        self, peer: PeerKey, reg_id: RegistrationId, reason: str, now: float, code: str = "write_failed"
    ) -> list[Instruction]:
        """The WRITEs of the leg have ended and at least one failed."""
        return self._leg_event((peer, reg_id), WriteFailed(), now, code, reason)

    # -- time -------------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        return self._deadlines.next_due()

    def tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for transfer_id in self._deadlines.lapsed(now):
            source = self._sources[transfer_id]
            if source.state is Source.UNSEEN:
                reason = f"no prefill request with this transfer id came within {self.unseen_s:g} s"
                out += self.abort(transfer_id, "prefill_never_came", reason, now)
            elif not source.at_work():
                limit = self.patience_s if source.waiting else self.lease_s
                reason = f"no decode engine came for it within the lease of {limit:g} s"
                out += self.abort(transfer_id, "lease_lapsed", reason, now)
        return out

    # -- views ------------------------------------------------------------------------------------------------------

    def ending(self, transfer_id: TransferId) -> Ending | None:
        return self._ended.get(transfer_id)

    def is_open(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._sources

    def open_count(self) -> int:
        return len(self._sources)

    def being_read(self) -> int:
        """Sources that a D rank reads now: our agent must be driven."""
        reading = (Leg.GRANTED, Leg.REVOKED)
        return sum(leg.state in reading for source in self._sources.values() for leg in source.legs.values())

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_mode(self, source: _Source, leg: _Leg, now: float) -> list[Instruction]:
        if leg.register.mode == source.mode:
            return []
        reason = f"mode: prefill side has {source.mode!r}, decode side has {leg.register.mode!r}; set the same on both"
        return self._apply(source, leg, SourceLost(), now, "mode_mismatch", reason)

    def _start(self, source: _Source, leg: _Leg, now: float) -> list[Instruction]:
        wanted = leg.register
        if wanted.start_token == wanted.end_token:
            return self._apply(source, leg, Nothing(), now, "", "")
        if wanted.end_token > source.num_tokens:
            reason = f"decode side wants {wanted.end_token} tokens, prefill side has {source.num_tokens}"
            return self._apply(source, leg, SourceLost(), now, "prompt_mismatch", reason)
        return self._apply(source, leg, StartPush() if wanted.mode == "push" else StartPull(), now, "", "")

    def _leg_event(
        self,
        key: LegKey,
        event: Cancelled | WriteDone | WriteFailed | ReadOk | ReadBad,
        now: float,
        code: str,
        reason: str,
        nbytes: int = 0,
        descriptors: int = 0,
    ) -> list[Instruction]:
        transfer_id = self._by_leg.get(key)
        if transfer_id is None:
            if isinstance(event, WriteDone | WriteFailed):
                return []
            text = "this registration has ended or was never made"
            return [Send(key[0], Failed(reg_id=key[1], code="expired_transfer", reason=text))]
        source = self._sources[transfer_id]
        out = self._apply(source, source.legs[key], event, now, code, reason, nbytes, descriptors)
        return out + self._settle(source, now)

    def _apply(
        self,
        source: _Source,
        leg: _Leg,
        event: object,
        now: float,
        code: str,
        reason: str,
        nbytes: int = 0,
        descriptors: int = 0,
    ) -> list[Instruction]:
        target, action = transition(LEG_TABLE, "prefill leg", leg.state, event)
        assert isinstance(target, Leg)
        if code and leg.state not in (Leg.FENCING, Leg.REVOKED):
            leg.code, leg.reason = code, reason
        leg.state = target
        if source.state is Source.READY:
            self._deadlines.clear(source.transfer_id)
        reg_id, peer = leg.register.reg_id, leg.peer
        out: list[Instruction] = []
        if action == "grant":
            out.append(Note(source.transfer_id, "matched"))
            out.append(Send(peer, Grant(reg_id=reg_id, block_ids=source.block_ids)))
        elif action == "write":
            out.append(Note(source.transfer_id, "matched"))
            out.append(Send(peer, Begin(reg_id=reg_id)))
            out.append(StartWrite(peer, leg.register, source.block_ids))
        elif action == "landed":
            out.append(Send(peer, Landed(reg_id=reg_id, nbytes=nbytes, descriptors=descriptors)))
        elif action == "failed" and not leg.peer_gone:
            out.append(Send(peer, Failed(reg_id=reg_id, code=leg.code, reason=leg.reason)))
        if target is Leg.ENDED:
            ok = action == "landed"
            source.ended_ok += ok
            source.ended_bad += not ok
            if not ok:
                source.last_failure = (leg.code, leg.reason)
            key = (peer, reg_id)
            del source.legs[key], self._by_leg[key]
            source.past.add(key)
        return out

    def _settle(self, source: _Source, now: float) -> list[Instruction]:
        """After any event: release the source if it is done, or restart its lease if it idles."""
        if source.state is not Source.READY or source.transfer_id not in self._sources:
            return []
        served = 0 < source.expected <= source.ended_ok + source.ended_bad
        if not source.legs and (served or source.doomed):
            ok = not source.doomed and source.ended_bad == 0
            code, reason = ("", "") if ok else source.last_failure
        else:
            if not source.at_work():
                patience = self.patience_s if source.waiting else self.lease_s
                self._deadlines.set(source.transfer_id, now + patience)
            return []
        self._forget(source, Ending(ok, code, reason))
        return [Release(source.transfer_id, ok, code, reason)]

    def _forget(self, source: _Source, ending: Ending) -> None:
        del self._sources[source.transfer_id]
        self._deadlines.clear(source.transfer_id)
        self._bury(source.transfer_id, ending)

    def _bury(self, transfer_id: TransferId, ending: Ending) -> None:
        self._ended.setdefault(transfer_id, ending)
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
