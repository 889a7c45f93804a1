"""Decode side: one request's KV on its way in. Pure: events in, instructions out.

A *landing* is one request on this D rank; it has one leg for each P rank that holds a part of what it needs. It is
over, once, when every leg is over and nothing can write to (or be read into) its blocks any more; it went well only if
every leg did. The first leg to fail cancels the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol.instructions import Note, PeerKey, Send
from kvferry.protocol.lease import Deadlines
from kvferry.protocol.messages import Cancel, Fetched, Mode, Register, Verify
from kvferry.protocol.table import Table, transition

RequestKey = str


class Leg(Enum):
    DIALING = auto()  # the peer isn't connected yet
    REGISTERED = auto()  # P knows the destination
    STREAMING = auto()  # stream: WRITEs are coming, and prefill still runs
    LANDING = auto()  # WRITEs are coming, and they are the last
    READING = auto()  # pull by READ: our READs are posted
    CONFIRMING = auto()  # read; P has yet to say that its blocks held still
    CANCELLING = auto()  # P has yet to say that no write can come
    DRAINING = auto()  # ended, but our READs have not
    SETTLING = auto()  # P is cut off or dead; what it had on the way may still arrive
    LANDED = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Connected:
    """The peer is up."""


@dataclass(frozen=True)
class Begun:
    """P's `Begin`, with all KV computed."""


@dataclass(frozen=True)
class BegunEarly:
    """P's `Begin`, while prefill still runs."""


@dataclass(frozen=True)
class SealedByPeer:
    """P's `Seal`: prefill is done."""


@dataclass(frozen=True)
class Granted:
    """P's `Grant`."""


@dataclass(frozen=True)
class LandedByPeer:
    """P's `Landed`."""


@dataclass(frozen=True)
class FailedByPeer:
    """P's `Failed`."""


@dataclass(frozen=True)
class ReadDone:
    """Every READ of the leg completed."""


@dataclass(frozen=True)
class ReadFailed:
    """The READs ended, at least one badly, and none is in flight any more."""


@dataclass(frozen=True)
class Stop:
    """The request was aborted, a time limit passed, or a sibling leg failed."""


@dataclass(frozen=True)
class PeerGone:
    """P is dead or cut off: it starts no WRITE any more."""


@dataclass(frozen=True)
class Settled:
    """Long enough after `PeerGone` that nothing of P can arrive."""


_OVER = (Leg.LANDED, Leg.FAILED)
LEG_TABLE: Table = {
    (Leg.DIALING, Connected): (Leg.REGISTERED, "register"),
    (Leg.DIALING, Stop): (Leg.FAILED, ""),
    (Leg.DIALING, PeerGone): (Leg.FAILED, ""),
    (Leg.REGISTERED, Begun): (Leg.LANDING, "landing"),
    (Leg.REGISTERED, BegunEarly): (Leg.STREAMING, "landing"),
    (Leg.REGISTERED, SealedByPeer): (Leg.LANDING, "landing"),
    (Leg.REGISTERED, Granted): (Leg.READING, "read"),
    (Leg.REGISTERED, LandedByPeer): (Leg.LANDED, ""),
    (Leg.REGISTERED, FailedByPeer): (Leg.FAILED, ""),
    (Leg.REGISTERED, Stop): (Leg.CANCELLING, "cancel"),
    (Leg.REGISTERED, PeerGone): (Leg.SETTLING, ""),
    (Leg.STREAMING, BegunEarly): (Leg.STREAMING, ""),
    (Leg.STREAMING, SealedByPeer): (Leg.LANDING, "sealed"),
    (Leg.STREAMING, LandedByPeer): (Leg.LANDED, ""),
    (Leg.STREAMING, FailedByPeer): (Leg.FAILED, ""),
    (Leg.STREAMING, Stop): (Leg.CANCELLING, "cancel"),
    (Leg.STREAMING, PeerGone): (Leg.SETTLING, ""),
    (Leg.LANDING, Begun): (Leg.LANDING, ""),
    (Leg.LANDING, BegunEarly): (Leg.LANDING, ""),
    (Leg.LANDING, SealedByPeer): (Leg.LANDING, ""),
    (Leg.LANDING, LandedByPeer): (Leg.LANDED, ""),
    (Leg.LANDING, FailedByPeer): (Leg.FAILED, ""),
    (Leg.LANDING, Stop): (Leg.CANCELLING, "cancel"),
    (Leg.LANDING, PeerGone): (Leg.SETTLING, ""),
    (Leg.READING, Granted): (Leg.READING, ""),
    (Leg.READING, ReadDone): (Leg.CONFIRMING, "fetched"),
    (Leg.READING, ReadFailed): (Leg.FAILED, "unfetched"),
    (Leg.READING, FailedByPeer): (Leg.DRAINING, ""),
    (Leg.READING, Stop): (Leg.DRAINING, ""),
    (Leg.READING, PeerGone): (Leg.DRAINING, ""),
    (Leg.DRAINING, Granted): (Leg.DRAINING, ""),
    (Leg.DRAINING, ReadDone): (Leg.FAILED, "unfetched"),
    (Leg.DRAINING, ReadFailed): (Leg.FAILED, "unfetched"),
    (Leg.DRAINING, FailedByPeer): (Leg.DRAINING, ""),
    (Leg.DRAINING, Stop): (Leg.DRAINING, ""),
    (Leg.DRAINING, PeerGone): (Leg.DRAINING, ""),
    (Leg.CONFIRMING, Granted): (Leg.CONFIRMING, ""),
    (Leg.CONFIRMING, LandedByPeer): (Leg.LANDED, ""),
    (Leg.CONFIRMING, FailedByPeer): (Leg.FAILED, ""),
    (Leg.CONFIRMING, Stop): (Leg.CONFIRMING, ""),
    (Leg.CONFIRMING, PeerGone): (Leg.FAILED, ""),
    (Leg.CANCELLING, Begun): (Leg.CANCELLING, ""),
    (Leg.CANCELLING, BegunEarly): (Leg.CANCELLING, ""),
    (Leg.CANCELLING, SealedByPeer): (Leg.CANCELLING, ""),
    (Leg.CANCELLING, Granted): (Leg.CANCELLING, ""),
    (Leg.CANCELLING, LandedByPeer): (Leg.FAILED, ""),
    (Leg.CANCELLING, FailedByPeer): (Leg.FAILED, ""),
    (Leg.CANCELLING, Stop): (Leg.CANCELLING, ""),
    (Leg.CANCELLING, PeerGone): (Leg.SETTLING, ""),
    (Leg.SETTLING, Settled): (Leg.FAILED, ""),
    (Leg.SETTLING, Begun): (Leg.SETTLING, ""),
    (Leg.SETTLING, BegunEarly): (Leg.SETTLING, ""),
    (Leg.SETTLING, SealedByPeer): (Leg.SETTLING, ""),
    (Leg.SETTLING, Granted): (Leg.SETTLING, ""),
    (Leg.SETTLING, LandedByPeer): (Leg.SETTLING, ""),
    (Leg.SETTLING, FailedByPeer): (Leg.SETTLING, ""),
    (Leg.SETTLING, Stop): (Leg.SETTLING, ""),
    (Leg.SETTLING, PeerGone): (Leg.SETTLING, ""),
}


@dataclass(frozen=True)
class StartRead:
    """Plan and post READs of tokens [start_token, end_token) from P's blocks into ours."""

    peer: PeerKey
    register: Register
    source_block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Destination:
    """What one request needs on this D rank, and from whom."""

    request: RequestKey
    transfer_id: TransferId
    mode: Mode
    start_token: int
    end_token: int
    block_ids: tuple[int, ...]
    peers: tuple[tuple[PeerKey, int], ...]  # (P rank's key, registrations that this P rank will see in all)
    prompt: str = ""  # see `Register`
    verify: Verify = "off"


@dataclass(frozen=True)
class Doomed:
    """The KV will not come, but P may still write: the request can fail now, its blocks stay until `Outcome`."""

    destination: Destination
    code: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """The landing is over. Exactly one per landing."""

    destination: Destination
    ok: bool
    code: str
    reason: str


Instruction = Send | StartRead | Doomed | Outcome | Note


@dataclass
class _Leg:
    peer: PeerKey
    register: Register
    state: Leg = Leg.DIALING


@dataclass
class _Landing:
    destination: Destination
    legs: dict[RegistrationId, _Leg] = field(default_factory=dict)
    code: str = ""
    reason: str = ""
    doomed: bool = False  # `Doomed` was said

    def over(self) -> bool:
        return all(leg.state in _OVER for leg in self.legs.values())


class Landings:
    """All landings of one D rank. Owned by one thread; `now` is that thread's monotonic clock in seconds.

    `dial_s`: limit for the peer to come up; `prefill_s`: from registered until prefill is done; `transfer_s`: from then
    until landed; `fence_s`: for P to confirm a READ, or to acknowledge a cancel before it is asked again; `settle_s`:
    for what a lost peer had on the way. There is no limit for P to acknowledge a cancel: until it does, or is lost, it
    may write. `credit`: streamed WRITEs that this rank takes at once; each P rank that something is open with gets an
    equal part, and one at least.
    """

    def __init__(
        self,
        *,
        dial_s: float,
        prefill_s: float,
        transfer_s: float,
        fence_s: float,
        settle_s: float = 0.75,
        credit: int = 16,
    ) -> None:
        self.dial_s, self.prefill_s, self.transfer_s, self.fence_s = dial_s, prefill_s, transfer_s, fence_s
        self.settle_s, self._credit = settle_s, credit
        self._landings: dict[RequestKey, _Landing] = {}
        self._by_reg: dict[RegistrationId, RequestKey] = {}
        self._next_reg = 1
        self._deadlines: Deadlines[RegistrationId] = Deadlines()

    # -- the engine's side ------------------------------------------------------------------------------------------

    def open(self, destination: Destination, up: set[PeerKey], now: float) -> list[Instruction]:
        """A request's blocks are allocated. `up`: which of its peers are connected already."""
        key = destination.request
        if key in self._landings:
            return []
        landing = self._landings[key] = _Landing(destination)
        for peer, legs in destination.peers:
            reg_id = RegistrationId(self._next_reg)
            self._next_reg += 1
            register = Register(
                reg_id=reg_id,
                transfer_id=destination.transfer_id,
                mode=destination.mode,
                start_token=destination.start_token,
                end_token=destination.end_token,
                block_ids=destination.block_ids,
                legs=legs,
                credit=self._credit,
                prompt=destination.prompt,
                verify=destination.verify,
            )
            landing.legs[reg_id] = _Leg(peer, register)
            self._by_reg[reg_id] = key
            self._deadlines.set(reg_id, now + self.dial_s)
        out: list[Instruction] = []
        for leg in list(landing.legs.values()):
            if leg.peer in up:
                out += self._apply(landing, leg, Connected(), now)
        return out

    def cancel(self, request: RequestKey, reason: str, now: float) -> list[Instruction]:
        """The engine gave the request up; its blocks go back when `Outcome` comes. Unknown requests: nothing."""
        landing = self._landings.get(request)
        return [] if landing is None else self._stop(landing, "cancelled", reason, now)

    def abandon(self, transfer_id: TransferId, reason: str, now: float) -> list[Instruction]:
        """Somebody wants this transfer to end: its requests here fail, their blocks go back when no write can come."""
        out: list[Instruction] = []
        for landing in list(self._landings.values()):
            if landing.destination.transfer_id == transfer_id and not landing.code:
                out += self._stop(landing, "abandoned", reason, now)
        return out

    # -- the prefill rank's side ------------------------------------------------------------------------------------

    def connected(self, peer: PeerKey, now: float) -> list[Instruction]:
        return self._to_peer_legs(peer, Connected(), now, only=Leg.DIALING)

    def peer_gone(self, peer: PeerKey, code: str, reason: str, now: float) -> list[Instruction]:
        return self._to_peer_legs(peer, PeerGone(), now, code=code, reason=reason)

    def silent(self, peer: PeerKey, reason: str, now: float) -> list[Instruction]:
        """Nothing was heard for too long, but the connection stands: P may be stopped in the middle of a WRITE, and go
        on with it. Its requests fail now; their blocks stay until P speaks or its connection goes."""
        out: list[Instruction] = []
        for landing in list(self._landings.values()):
            if any(leg.peer == peer and leg.state not in _OVER for leg in landing.legs.values()):
                out += self._stop(landing, "peer_gone", reason, now)
        return out

    def begun(self, reg_id: RegistrationId, sealed: bool, now: float) -> list[Instruction]:
        return self._to_leg(reg_id, Begun() if sealed else BegunEarly(), now)

    def sealed(self, reg_id: RegistrationId, now: float) -> list[Instruction]:
        return self._to_leg(reg_id, SealedByPeer(), now)

    def granted(self, reg_id: RegistrationId, block_ids: tuple[int, ...], now: float) -> list[Instruction]:
        return self._to_leg(reg_id, Granted(), now, block_ids=block_ids)

    def landed(self, reg_id: RegistrationId, now: float) -> list[Instruction]:
        return self._to_leg(reg_id, LandedByPeer(), now)

    def failed(
        self, reg_id: RegistrationId, code: str, reason: str, now: float, final: bool = True
    ) -> list[Instruction]:
        """Not `final`: some of it may still arrive, until P is gone or has welcomed us anew."""
        key = self._by_reg.get(reg_id)
        if not final:
            return [] if key is None else self._stop(self._landings[key], code, reason, now)
        return self._to_leg(reg_id, FailedByPeer(), now, code=code, reason=reason)

    # -- the fabric's side ------------------------------------------------------------------------------------------

    def read_done(self, reg_id: RegistrationId, now: float) -> list[Instruction]:
        return self._to_leg(reg_id, ReadDone(), now)

    def read_failed(self, reg_id: RegistrationId, reason: str, now: float) -> list[Instruction]:
        return self._to_leg(reg_id, ReadFailed(), now, code="read_failed", reason=reason)

    def fenced(self, now: float) -> list[Instruction]:
        """Nothing that was on its way can arrive any more, and none of our READs is in flight."""
        out: list[Instruction] = []
        for landing in list(self._landings.values()):
            for leg in list(landing.legs.values()):
                if leg.state is Leg.SETTLING:
                    out += self._apply(landing, leg, Settled(), now)
                elif leg.state in (Leg.READING, Leg.DRAINING):
                    out += self._apply(landing, leg, ReadFailed(), now)
        return out

    # -- time -------------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        return self._deadlines.next_due()

    def tick(self, now: float, may_write: Callable[[PeerKey], bool] = lambda peer: False) -> list[Instruction]:
        """`may_write`: this lost peer is there, and has not said yet that what it had on the way is over."""
        out: list[Instruction] = []
        for reg_id in self._deadlines.lapsed(now):
            if reg_id not in self._by_reg or reg_id in self._deadlines:
                continue  # ended, or given a new limit, with a sibling just now
            landing = self._landings[self._by_reg[reg_id]]
            leg = landing.legs[reg_id]
            if leg.state is Leg.CONFIRMING:  # nobody writes, and what was read is of no use unconfirmed
                reason = f"no confirmation within {self.fence_s:g} s"
                out.append(Send(leg.peer, Cancel(reg_id=reg_id, reason=reason)))  # it may not know that we have read
                out += self._apply(landing, leg, PeerGone(), now, code="transfer_timeout", reason=reason)
            elif leg.state is Leg.CANCELLING:  # asked again: either word may have been lost
                out.append(Send(leg.peer, Cancel(reg_id=reg_id, reason=landing.reason)))
                self._set_deadline(reg_id, leg.state, now)
            elif leg.state is Leg.SETTLING and may_write(leg.peer):
                self._set_deadline(reg_id, leg.state, now)
            elif leg.state is Leg.SETTLING:
                out += self._apply(landing, leg, Settled(), now)
            elif leg.state is Leg.DIALING:
                out += self._stop(landing, "peer_unreachable", f"not connected within {self.dial_s:g} s", now)
            elif leg.state in (Leg.REGISTERED, Leg.STREAMING):
                reason = f"prefill did not deliver within {self.prefill_s:g} s of the registration"
                out += self._stop(landing, "transfer_timeout", reason, now)
            else:
                reason = f"the transfer took more than {self.transfer_s:g} s"
                out += self._stop(landing, "transfer_timeout", reason, now)
        return out

    # -- views ------------------------------------------------------------------------------------------------------

    def is_open(self, transfer_id: TransferId) -> bool:
        """Whether KV of this transfer is awaited here (an empty registration awaits none, a failed one no more)."""
        destinations = (landing.destination for landing in self._landings.values() if not landing.code)
        return any(one.transfer_id == transfer_id and one.start_token < one.end_token for one in destinations)

    def failing(self, transfer_id: TransferId) -> tuple[str, str] | None:
        """Code and reason of a transfer that has failed, while its blocks wait for the last word on them."""
        for landing in self._landings.values():
            if landing.code and landing.destination.transfer_id == transfer_id:
                return landing.code, landing.reason
        return None

    def register_of(self, reg_id: RegistrationId, peer: PeerKey) -> Register | None:
        """Of a leg with that peer that is not over."""
        request = self._by_reg.get(reg_id)
        leg = self._landings[request].legs[reg_id] if request is not None else None
        return leg.register if leg is not None and leg.peer == peer and leg.state not in _OVER else None

    def reads(self, reg_id: RegistrationId) -> bool:
        """We have read it, or do: nobody wrote."""
        request = self._by_reg.get(reg_id)
        reading = (Leg.READING, Leg.CONFIRMING, Leg.DRAINING)
        return request is not None and self._landings[request].legs[reg_id].state in reading

    def is_with(self, peer: PeerKey, reg_id: RegistrationId) -> bool:
        """False for a registration that was made with somebody else."""
        request = self._by_reg.get(reg_id)
        return request is None or self._landings[request].legs[reg_id].peer == peer

    def open_count(self) -> int:
        return len(self._landings)

    def quarantined_blocks(self) -> int:
        """Of landings whose request has failed or was aborted, and that P may still write to."""
        return sum(len(one.destination.block_ids) for one in self._landings.values() if one.code)

    def held_by_others(self, up: set[PeerKey]) -> int:
        """Blocks of failed landings that wait for peers which are not `up`."""
        failed = [one for one in self._landings.values() if one.code]
        return sum(
            len(one.destination.block_ids)
            for one in failed
            if any(leg.state not in _OVER and leg.peer not in up for leg in one.legs.values())
        )

    def settling(self, peer: PeerKey) -> bool:
        """Whether this lost peer may still have something on the way to us."""
        legs = (leg for one in self._landings.values() for leg in one.legs.values())
        return any(leg.state is Leg.SETTLING and leg.peer == peer for leg in legs)

    def incoming(self) -> int:
        """Legs whose bytes another rank is moving now, or may be: our agent must be driven."""
        moving = (Leg.STREAMING, Leg.LANDING, Leg.CANCELLING, Leg.SETTLING)
        return sum(leg.state in moving for one in self._landings.values() for leg in one.legs.values())

    # -- inside -----------------------------------------------------------------------------------------------------

    def _to_peer_legs(
        self, peer: PeerKey, event: object, now: float, *, only: Leg | None = None, code: str = "", reason: str = ""
    ) -> list[Instruction]:
        out: list[Instruction] = []
        for landing in list(self._landings.values()):
            for leg in list(landing.legs.values()):
                if leg.peer == peer and leg.state not in _OVER and only in (None, leg.state):
                    out += self._apply(landing, leg, event, now, code=code, reason=reason)
        return out

    def _to_leg(
        self,
        reg_id: RegistrationId,
        event: object,
        now: float,
        *,
        block_ids: tuple[int, ...] = (),
        code: str = "",
        reason: str = "",
    ) -> list[Instruction]:
        key = self._by_reg.get(reg_id)
        if key is None:
            return []  # about a landing that is over: late or twice
        landing = self._landings[key]
        leg = landing.legs[reg_id]
        if leg.state in _OVER:
            return []
        return self._apply(landing, leg, event, now, block_ids=block_ids, code=code, reason=reason)

    def _stop(self, landing: _Landing, code: str, reason: str, now: float) -> list[Instruction]:
        if not landing.code:
            landing.code, landing.reason = code, reason
        out: list[Instruction] = []
        for leg in list(landing.legs.values()):
            if leg.state not in _OVER:
                out += self._apply(landing, leg, Stop(), now)
        if not landing.over() and not landing.doomed and landing.code != "cancelled":
            landing.doomed = True
            out.append(Doomed(landing.destination, landing.code, landing.reason))
        return out

    def _apply(
        self,
        landing: _Landing,
        leg: _Leg,
        event: object,
        now: float,
        *,
        block_ids: tuple[int, ...] = (),
        code: str = "",
        reason: str = "",
    ) -> list[Instruction]:
        target, action = transition(LEG_TABLE, "decode leg", leg.state, event)
        assert isinstance(target, Leg)
        if code and not landing.code:
            landing.code, landing.reason = code, reason
        changed = target is not leg.state
        leg.state = target
        reg_id, where = leg.register.reg_id, landing.destination
        out: list[Instruction] = []
        if action == "register":
            leg.register = msgspec.structs.replace(leg.register, credit=self._credit_of_each())
            out += [Send(leg.peer, leg.register), Note(where.transfer_id, "registered")]
        elif action == "landing":
            out.append(Note(where.transfer_id, "landing"))
        elif action == "sealed":
            out.append(Note(where.transfer_id, "sealed"))
        elif action == "read":
            out += [StartRead(leg.peer, leg.register, block_ids), Note(where.transfer_id, "granted")]
        elif action == "unfetched" and landing.code == "cancelled":
            out.append(Send(leg.peer, Cancel(reg_id=reg_id, reason=landing.reason)))
        elif action in ("fetched", "unfetched"):
            out.append(Send(leg.peer, Fetched(reg_id=reg_id, ok=action == "fetched")))
        elif action == "cancel":
            out.append(Send(leg.peer, Cancel(reg_id=reg_id, reason=landing.reason)))
        if changed and target is not Leg.STREAMING:  # which has the limit of REGISTERED
            self._set_deadline(reg_id, target, now)
        if changed and target in (Leg.FAILED, Leg.SETTLING, Leg.DRAINING):
            out += self._stop(landing, code or "transfer_failed", reason or "transfer failed", now)
        if changed and target in _OVER and landing.over() and where.request in self._landings:
            out += self._close(landing)
        return out

    def _credit_of_each(self) -> int:
        legs = (leg for one in self._landings.values() for leg in one.legs.values())
        peers = {leg.peer for leg in legs if leg.state not in (Leg.DIALING, *_OVER)}
        return max(1, self._credit // len(peers))

    def _set_deadline(self, reg_id: RegistrationId, state: Leg, now: float) -> None:
        limit = {
            Leg.REGISTERED: self.prefill_s,
            Leg.LANDING: self.transfer_s,
            Leg.READING: self.transfer_s,
            Leg.CONFIRMING: self.fence_s,
            Leg.CANCELLING: self.fence_s,
            Leg.SETTLING: self.settle_s,
        }.get(state)
        if limit is None:
            self._deadlines.clear(reg_id)
        else:
            self._deadlines.set(reg_id, now + limit)

    def _close(self, landing: _Landing) -> list[Instruction]:
        where = landing.destination
        del self._landings[where.request]
        for reg_id in landing.legs:
            del self._by_reg[reg_id]
            self._deadlines.clear(reg_id)
        ok = all(leg.state is Leg.LANDED for leg in landing.legs.values()) and not landing.code
        note = Note(where.transfer_id, "landed" if ok else "failed", landing.reason)
        return [note, Outcome(where, ok, landing.code, landing.reason)]
