"""Prefill side: where a destination meets its source, in either order. Pure: events in, instructions out.

A *source* is one request on this P rank; a *leg* is one registration by one D rank. The source is released, once,
when all its legs have ended, or when its lease lapses with no leg at work. Nothing is released while a WRITE or a
granted READ may still touch its blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvferry.errors import PromptMismatch
from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol.instructions import Note, PeerKey, Release, Rewound, Send, StartWrite, Tell
from kvferry.protocol.lease import Deadlines
from kvferry.protocol.legs import (
    LEG_TABLE,
    Cancelled,
    Faltered,
    Leg,
    Nothing,
    PeerGone,
    ReadBad,
    ReadOk,
    Sealed,
    SourceLost,
    StartPull,
    StartPush,
    StartStream,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.messages import Begin, Failed, Grant, Landed, Mode, Reached, Register, Seal
from kvferry.protocol.prompt import PromptMark, mismatch
from kvferry.protocol.sources import Ending, LegKey, Source, SourceLeg, SourceState
from kvferry.protocol.stream import Growth, Pace, Progress, Span
from kvferry.protocol.table import transition

Instruction = Send | StartWrite | Rewound | Tell | Release | Note


class Rendezvous:
    """All sources of one P rank. Owned by one thread; `now` is that thread's monotonic clock in seconds.

    `lease_s`: how long a READY source waits for a registration. `patience_s`: the same while a
    living D rank says that its request queues. `unseen_s`: how long a registration waits for its request to show up.
    `remember`: how many ended transfers are kept to refuse late comers by name. `max_flying`: streamed WRITEs in flight
    to one peer, or fewer if it says so; more chunks wait and become one.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        unseen_s: float,
        patience_s: float = 300.0,
        remember: int = 10_000,
        max_flying: int = 4,
    ) -> None:
        self.lease_s, self.patience_s, self.max_flying = lease_s, patience_s, max_flying
        self.unseen_s = unseen_s
        self._remember = remember
        self._sources: dict[TransferId, Source] = {}
        self._by_leg: dict[LegKey, TransferId] = {}
        self._ended: OrderedDict[TransferId, Ending] = OrderedDict()
        self._deadlines: Deadlines[TransferId] = Deadlines()
        self._flying: Counter[PeerKey] = Counter()  # streamed WRITEs in flight
        self._credit: dict[PeerKey, int] = {}  # that each peer takes, by its last registration

    # -- the engine's side ------------------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: TransferId,
        mode: Mode,
        fan_out: int,
        now: float,
        num_tokens: int = 0,
        prompt: PromptMark | None = None,
    ) -> list[Instruction]:
        """The engine has taken in the request, a prompt of `num_tokens`; its KV will come."""
        source = self._sources.get(transfer_id)
        if transfer_id in self._ended or (source is not None and source.state is not SourceState.UNSEEN):
            return [Note(transfer_id, "duplicate", "transfer id already used on this engine")]
        if source is None:
            source = self._sources[transfer_id] = Source(transfer_id)
        source.state = SourceState.COMPUTING
        source.mode, source.fan_out, source.num_tokens, source.prompt = mode, fan_out, num_tokens, prompt
        source.expected = source.legs_stated * fan_out
        self._deadlines.clear(transfer_id)
        out: list[Instruction] = [Note(transfer_id, "queued")]
        for leg in list(source.legs.values()):
            out += self._check(source, leg, now)
        return out + self._tell(source)

    def grown(
        self,
        transfer_id: TransferId,
        block_ids: tuple[int, ...],
        tokens: int,
        now: float,
        planes: int | None = None,
    ) -> list[Instruction]:
        """Stream: more KV is there, up to `tokens` (with `planes`: only the first ones of what is new). `block_ids`:
        those that hold it and were not named before. They stay until `Release`, or until `Rewound`."""
        source = self._sources.get(transfer_id)
        if source is None or source.state is not SourceState.COMPUTING or source.doomed:
            return []  # it was given up meanwhile
        source.block_ids += block_ids
        if planes is None:
            source.growth.grow(tokens)
        else:
            source.growth.grow_part(tokens, planes)
        return self._pump_all(source, now) + self._tell(source)

    def rewind(self, transfer_id: TransferId, now: float) -> list[Instruction]:
        """Stream: the engine takes the blocks back and will compute the prompt anew. `Rewound` when nothing reads them.
        Sources that are not here (any more) are rewound at once."""
        source = self._sources.get(transfer_id)
        if source is None or source.state is not SourceState.COMPUTING:
            return [Rewound(transfer_id)]
        source.attempt += 1
        source.block_ids, source.growth, source.rewinding = (), Growth(), True
        for leg in source.legs.values():
            leg.progress.rewind()
            leg.nbytes = leg.descriptors = 0
            leg.stale = leg.flying > 0
        return [Note(transfer_id, "rewound"), *self._settle(source, now)]

    def ready(
        self, transfer_id: TransferId, block_ids: tuple[int, ...], num_tokens: int, now: float
    ) -> list[Instruction]:
        """All KV of tokens [0, num_tokens) is in `block_ids` (logical block 0 first), and stays until `Release`."""
        source = self._sources.get(transfer_id)
        if source is None or source.state is not SourceState.COMPUTING:
            ending = self._ended.get(transfer_id, Ending(False, "unknown_transfer", "not expected here"))
            return [Release(transfer_id, False, ending.code, ending.reason)]
        source.state = SourceState.READY
        source.block_ids, source.num_tokens = block_ids, num_tokens
        source.growth.grow(num_tokens)
        source.growth.sealed = True
        out: list[Instruction] = [Note(transfer_id, "computed")]
        for leg in list(source.legs.values()):
            out += self._start(source, leg, now)
        return out + self._tell(source) + self._settle(source, now)

    def abort(
        self, transfer_id: TransferId, code: str, reason: str, now: float, held: bool = False
    ) -> list[Instruction]:
        """The request ended without (all of) its KV, or nobody will come for it (`Abandon`). `held`: the engine keeps
        its blocks until `Release`. Idempotent but for that."""
        source = self._sources.get(transfer_id)
        if source is None:
            self._bury(transfer_id, Ending(False, code, reason))
            return [Release(transfer_id, False, code, reason)] if held else []
        source.owed = source.owed or held
        out: list[Instruction] = []
        source.last_failure = (code, reason)
        source.doomed = True
        for leg in list(source.legs.values()):
            out += self._apply(source, leg, SourceLost(), now, code, reason)
        if not source.held:
            out.append(Note(transfer_id, "failed", reason))
        return out + self._settle(source, now)

    # -- the decode rank's side -------------------------------------------------------------------------------------

    def register(
        self,
        peer: PeerKey,
        message: Register,
        now: float,
        pace: Pace = Pace(),  # noqa: B008 - immutable
        reads: bool = True,
    ) -> list[Instruction]:
        """`reads`: in mode pull D may read; else we write, as in push."""
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
            source = self._sources[transfer_id] = Source(transfer_id)
            self._deadlines.set(transfer_id, now + self.unseen_s)
        if key in source.past:
            return []  # re-sent, late
        progress = Progress(message.start_token, message.end_token, pace)
        leg = source.legs[key] = SourceLeg(peer, message, progress, reads)
        self._credit[peer] = message.credit
        self._by_leg[key] = transfer_id
        source.legs_stated = max(source.legs_stated, message.legs)
        source.expected = source.legs_stated * source.fan_out
        out: list[Instruction] = [Note(transfer_id, "met" if source.state is SourceState.READY else "held")]
        if source.state is not SourceState.UNSEEN:
            out += self._check(source, leg, now)
        if source.doomed and leg.state is Leg.HELD:
            out += self._apply(source, leg, SourceLost(), now, *source.last_failure)
        elif source.state is SourceState.READY and leg.state is Leg.HELD:
            out += self._start(source, leg, now)
        elif source.state is SourceState.COMPUTING:
            out += self._pump(source, leg, now)
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
        self.unwatch(peer)
        self._credit.pop(peer, None)
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
        return self._written((peer, reg_id), now, nbytes, descriptors)

    def write_failed(
        self,
        peer: PeerKey,
        reg_id: RegistrationId,
        reason: str,
        now: float,
        code: str = "write_failed",
        *,
        lost: bool = False,
        over: bool = True,
    ) -> list[Instruction]:
        """One WRITE of the leg has ended badly. `lost`: with its peer, and `peer_gone` follows. Not `over`: nobody
        waits for it any more, but its bytes may still arrive, so D must not take our word for its blocks."""
        transfer_id = self._by_leg.get((peer, reg_id))
        if transfer_id is not None and not over:
            self._sources[transfer_id].legs[peer, reg_id].unsure = True
        return self._written((peer, reg_id), now, 0, 0, code, reason, lost)

    # -- whoever asks -----------------------------------------------------------------------------------------------

    def watch(self, asker: PeerKey, transfer_id: TransferId, percent: int, now: float) -> list[Instruction]:
        """Tell `asker` once when `percent` of the prompt are computed, or when the transfer is over."""
        source = self._sources.get(transfer_id)
        if source is None:
            if transfer_id in self._ended:
                return [Tell(asker, Reached(transfer_id=transfer_id, tokens=0, of=0, ended=True))]
            source = self._sources[transfer_id] = Source(transfer_id)
            self._deadlines.set(transfer_id, now + self.unseen_s)
        source.watchers.append((asker, percent))
        return self._tell(source)

    def unwatch(self, asker: PeerKey) -> None:
        """The asker is gone."""
        for source in self._sources.values():
            source.watchers = [one for one in source.watchers if one[0] != asker]

    # -- time -------------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        return self._deadlines.next_due()

    def tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for transfer_id in self._deadlines.lapsed(now):
            source = self._sources[transfer_id]
            if source.state is SourceState.UNSEEN and not (source.legs or source.past):
                # Only its progress was asked for: it may still come.
                del self._sources[transfer_id]
                out += self._tell(source, ended=True)
            elif source.state is SourceState.UNSEEN:
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

    def met(self, peer: PeerKey, message: Register) -> bool:
        """Whether this registration is here already, or was, of a transfer that is still open."""
        key, source = (peer, message.reg_id), self._sources.get(message.transfer_id)
        return key in self._by_leg or (source is not None and key in source.past)

    def is_open(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._sources

    def register_of(self, peer: PeerKey, reg_id: RegistrationId) -> Register | None:
        """Of a leg that has not ended."""
        transfer_id = self._by_leg.get((peer, reg_id))
        return None if transfer_id is None else self._sources[transfer_id].legs[peer, reg_id].register

    def open_count(self) -> int:
        return len(self._sources)

    def being_read(self) -> int:
        """Sources that a D rank reads now: our agent must be driven."""
        reading = (Leg.GRANTED, Leg.REVOKED)
        return sum(leg.state in reading for source in self._sources.values() for leg in source.legs.values())

    def backlog_bytes(self) -> int:
        """Stream: KV that is computed and registered for, but not posted. A token counts until all its planes are."""
        going = (Leg.HELD, Leg.STREAMING, Leg.WRITING)
        streamed = [source for source in self._sources.values() if source.mode == "stream"]
        return sum(
            leg.progress.behind(source.growth)
            for source in streamed
            for leg in source.legs.values()
            if leg.state in going
        )

    def quarantined_blocks(self) -> int:
        """Of sources that were given up, and that a WRITE or READ may still read."""
        return sum(len(source.block_ids) for source in self._sources.values() if source.doomed and source.held)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self, source: Source, leg: SourceLeg, now: float) -> list[Instruction]:
        code, reason = PromptMismatch.code, mismatch(source.prompt, leg.register)
        if leg.register.mode != source.mode:
            sides = f"prefill side has {source.mode!r}, decode side has {leg.register.mode!r}"
            code, reason = "mode_mismatch", f"mode: {sides}; set the same on both"
        return self._apply(source, leg, SourceLost(), now, code, reason) if reason else []

    def _start(self, source: Source, leg: SourceLeg, now: float) -> list[Instruction]:
        wanted = leg.register
        if wanted.start_token == wanted.end_token:
            return self._apply(source, leg, Nothing(), now, "", "")
        if wanted.end_token > source.num_tokens:
            reason = f"decode side wants {wanted.end_token} tokens, prefill side has {source.num_tokens}"
            return self._apply(source, leg, SourceLost(), now, "prompt_mismatch", reason)
        if wanted.mode == "pull" and leg.reads:
            return self._apply(source, leg, StartPull(), now, "", "")
        if wanted.mode != "stream":
            return self._apply(source, leg, StartPush(), now, "", "")
        return self._pump(source, leg, now)

    def _pump_all(self, source: Source, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for leg in list(source.legs.values()):
            out += self._pump(source, leg, now)
        return out

    def _pump(self, source: Source, leg: SourceLeg, now: float) -> list[Instruction]:
        """Stream: write what is there and not yet written, as far as the peer may be loaded."""
        if leg.register.mode != "stream" or leg.stale or leg.state not in (Leg.HELD, Leg.STREAMING, Leg.WRITING):
            return []
        out: list[Instruction] = []
        most = min(self.max_flying, self._credit[leg.peer])
        while self._flying[leg.peer] < most and (span := leg.progress.take(source.growth)) is not None:
            if leg.state is Leg.HELD:
                out += self._apply(source, leg, StartStream(), now, "", "")
            out.append(StartWrite(leg.peer, leg.register, source.block_ids, span))
            leg.flying += 1
            self._flying[leg.peer] += 1
        if source.growth.sealed and leg.state is Leg.STREAMING:
            out += self._apply(source, leg, Sealed(), now, "", "")
        if leg.state is Leg.WRITING and leg.progress.complete and not leg.flying:
            out += self._apply(source, leg, WriteDone(), now, "", "")
        return out

    def _written(
        self,
        key: LegKey,
        now: float,
        nbytes: int,
        descriptors: int,
        code: str = "",
        reason: str = "",
        lost: bool = False,
    ) -> list[Instruction]:
        transfer_id = self._by_leg.get(key)
        if transfer_id is None:
            return []
        source = self._sources[transfer_id]
        leg = source.legs[key]
        leg.flying -= 1
        streamed = leg.register.mode == "stream"
        if streamed:
            self._flying[leg.peer] -= 1
            if not self._flying[leg.peer]:
                del self._flying[leg.peer]
        if not leg.stale:
            leg.nbytes, leg.descriptors = leg.nbytes + nbytes, leg.descriptors + descriptors
        out: list[Instruction] = []
        if code:
            leg.bad = True
        if not leg.flying:
            leg.stale = False
            if leg.bad:
                out += self._apply(source, leg, WriteFailed(), now, code, reason)
            elif leg.state is Leg.FENCING or (leg.state is Leg.WRITING and leg.progress.complete):
                out += self._apply(source, leg, WriteDone(), now, "", "")
        elif code:
            out += self._apply(source, leg, Faltered(), now, code, reason)
        if lost:
            return out + self._settle(source, now)
        out += self._pump_all(source, now) + self._settle(source, now)
        if streamed:
            for other in [one for one in self._sources.values() if one is not source and one.mode == "stream"]:
                if more := self._pump_all(other, now):
                    out += more + self._settle(other, now)  # else its lease runs on
        return out

    def _tell(self, source: Source, ended: bool = False) -> list[Instruction]:
        """Those who wait for what is reached now."""
        tokens, of = source.growth.tokens, source.num_tokens
        known = source.state is not SourceState.UNSEEN
        due = [
            (asker, percent)
            for asker, percent in source.watchers
            if ended or source.growth.sealed or (known and tokens * 100 >= percent * of)
        ]
        source.watchers = [one for one in source.watchers if one not in due]
        return [
            Tell(asker, Reached(transfer_id=source.transfer_id, tokens=tokens, of=of, ended=ended)) for asker, _ in due
        ]

    def _leg_event(
        self,
        key: LegKey,
        event: Cancelled | ReadOk | ReadBad,
        now: float,
        code: str,
        reason: str,
    ) -> list[Instruction]:
        transfer_id = self._by_leg.get(key)
        if transfer_id is None:
            text = "this registration has ended or was never made"
            return [Send(key[0], Failed(reg_id=key[1], code="expired_transfer", reason=text))]
        source = self._sources[transfer_id]
        out = self._apply(source, source.legs[key], event, now, code, reason)
        return out + self._settle(source, now)

    def _apply(
        self,
        source: Source,
        leg: SourceLeg,
        event: object,
        now: float,
        code: str,
        reason: str,
    ) -> list[Instruction]:
        target, action = transition(LEG_TABLE, "prefill leg", leg.state, event)
        assert isinstance(target, Leg)
        if code and leg.state not in (Leg.FENCING, Leg.REVOKED):
            leg.code, leg.reason = code, reason
        leg.state = target
        if source.state is SourceState.READY:
            self._deadlines.clear(source.transfer_id)
        reg_id, peer = leg.register.reg_id, leg.peer
        out: list[Instruction] = []
        if action == "grant":
            out.append(Note(source.transfer_id, "matched"))
            out.append(Send(peer, Grant(reg_id=reg_id, block_ids=source.block_ids)))
        elif action == "write":
            out.append(Note(source.transfer_id, "matched"))
            out.append(Send(peer, Begin(reg_id=reg_id, sealed=True)))
            span = Span(leg.register.start_token, leg.register.end_token)
            out.append(StartWrite(peer, leg.register, source.block_ids, span))
            leg.flying += 1
            leg.progress.tokens = leg.progress.end
        elif action == "stream":
            out.append(Note(source.transfer_id, "matched"))
            out.append(Send(peer, Begin(reg_id=reg_id, sealed=False)))
        elif action == "seal":
            out.append(Note(source.transfer_id, "sealed"))
            out.append(Send(peer, Seal(reg_id=reg_id, end_token=leg.register.end_token, attempt=source.attempt)))
        elif action == "landed":
            out.append(Send(peer, Landed(reg_id=reg_id, nbytes=leg.nbytes, descriptors=leg.descriptors)))
        elif action == "failed" and not leg.peer_gone:
            out.append(Send(peer, Failed(reg_id=reg_id, code=leg.code, reason=leg.reason, final=not leg.unsure)))
        if target is Leg.ENDED:
            ok = action == "landed"
            source.ended_ok += ok
            source.ended_bad += not ok
            if not ok:
                source.last_failure = (leg.code, leg.reason)
            key = (peer, reg_id)
            del source.legs[key], self._by_leg[key]
            source.past.add(key)
        elif target is Leg.FENCING and not leg.flying:
            out += self._apply(source, leg, WriteDone(), now, "", "")
        return out

    def _settle(self, source: Source, now: float) -> list[Instruction]:
        """After any event: release the source if it is done, or restart its lease if it idles."""
        if source.transfer_id not in self._sources:
            return []
        rewound: list[Instruction] = []
        if source.rewinding and not any(leg.flying for leg in source.legs.values()):
            source.rewinding = False
            rewound.append(Rewound(source.transfer_id))
        if source.state is not SourceState.READY and not source.doomed:
            return rewound
        served = 0 < source.expected <= source.ended_ok + source.ended_bad
        if not source.legs and (served or source.doomed):
            ok = not source.doomed and source.ended_bad == 0
            code, reason = ("", "") if ok else source.last_failure
        else:
            if source.state is SourceState.READY and not source.at_work():
                patience = self.patience_s if source.waiting else self.lease_s
                self._deadlines.set(source.transfer_id, now + patience)
            return rewound
        told = self._forget(source, Ending(ok, code, reason))
        release = [Release(source.transfer_id, ok, code, reason)] if source.held else []
        return [*rewound, *release, *told]

    def _forget(self, source: Source, ending: Ending) -> list[Instruction]:
        del self._sources[source.transfer_id]
        self._deadlines.clear(source.transfer_id)
        self._bury(source.transfer_id, ending)
        return self._tell(source, ended=True)

    def _bury(self, transfer_id: TransferId, ending: Ending) -> None:
        self._ended.setdefault(transfer_id, ending)
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
