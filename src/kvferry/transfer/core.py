"""The transfer core of one rank: both directions, all I/O, one owner thread.

It joins the pure machines (`protocol/rendezvous.py`, `protocol/landing.py`) to a fabric and a side channel: commands
and channel events go in, the machines' instructions are carried out, their outcomes go back in as events, and each
request ends in exactly one `Result`. Whoever calls `step` owns everything here; `TransferThread` gives it a thread of
its own, inline mode calls it from the engine loop.

`step` sleeps in `channel.poll` unless bytes are in flight: only then is the fabric driven.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvferry import __version__
from kvferry.config import ConnectorConfig, parse_address
from kvferry.errors import CompatError, FabricError, KVFerryError
from kvferry.ids import EngineId, RegistrationId, TransferId, new_life_id
from kvferry.protocol import codec, landing, rendezvous
from kvferry.protocol import messages as wire
from kvferry.protocol.layout import check_compatible, fan_in, legs_for
from kvferry.protocol.plan import PlanError, plan
from kvferry.protocol.table import UnexpectedEvent
from kvferry.story import Story
from kvferry.transfer import commands as cmd
from kvferry.transfer.audit import block_digests
from kvferry.transfer.channel import Channel, Down, Got, Up
from kvferry.transfer.fabric import Fabric, Handle, Op
from kvferry.transfer.peers import Peer, Stage

log = logging.getLogger("kvferry.transfer")

SCRATCH_BYTES = 64
_SPIN_S = 0.02  # after this long without progress the fabric is driven once a millisecond instead of all the time
_REMEMBERED_ENDINGS = 10_000
_REDIAL_S = 0.5  # pause before a lost peer is dialled again; a request that wants it dials at once
_STOPPED_S = 0.5  # after so long a pause (SIGSTOP) we listen before we write on: we may have been cut off meanwhile
_CUT_OFF = "cut_off"  # code of a `Refuse` that means: greet me anew


@dataclass(frozen=True)
class Identity:
    """Which rank this is. `role`: 'producer', 'consumer' or 'both'."""

    engine_id: EngineId
    rank: int
    tp_size: int
    role: str


@dataclass
class _Post:
    op: Op
    peer: str
    register: wire.Register
    handle: Handle | None  # None: could not be posted
    nbytes: int
    descriptors: int
    posted_at: float


@dataclass
class _Opening:
    """A request whose prefill engine isn't connected yet."""

    land: cmd.Land
    due: float


class TransferCore:
    """See the module. `scratch`: address of `SCRATCH_BYTES` registered bytes on the layout's device.

    `on_result` is called on the owner thread. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        fabric: Fabric,
        channel: Channel,
        layout: wire.Layout,
        scratch: int,
        story: Story,
        on_result: Callable[[cmd.Result], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity, self.config = identity, config
        self.life = new_life_id()
        self._fabric, self._channel = fabric, channel
        self._layout, self._scratch = layout, scratch
        self._story, self._on_result, self._clock = story, on_result, clock
        self._metadata = fabric.metadata()
        self._rendezvous = rendezvous.Rendezvous(lease_s=config.lease_s, unseen_s=config.registration_timeout_s)
        self._landings = landing.Landings(
            dial_s=config.connect_timeout_s,
            prefill_s=config.prefill_timeout_s,
            transfer_s=config.transfer_timeout_s,
            fence_s=config.lease_s,
        )
        self._commands: deque[cmd.Command] = deque()
        self._peers: dict[str, Peer] = {}
        self._posts: list[_Post] = []
        self._openings: dict[str, _Opening] = {}
        self._waiting_moments: list[cmd.Ready] = []
        self._requests: dict[TransferId, str] = {}
        self._endings: OrderedDict[TransferId, tuple[bool, str, str]] = OrderedDict()
        self._last_progress = 0.0
        self._driven_at = 0.0
        self._standing = {parse_address(peer, "peers") for peer in config.peers}
        for host, port in sorted(self._standing):
            self._dial(host, port)

    # -- any thread -------------------------------------------------------------------------------------------------

    def submit(self, command: cmd.Command) -> None:
        """Hand over a command; the owner takes it up in its next `step`."""
        self._commands.append(command)
        self._channel.wake()

    def wake(self) -> None:
        """End the owner's sleep."""
        self._channel.wake()

    # -- the owner thread -------------------------------------------------------------------------------------------

    def step(self, max_wait_s: float | None) -> None:
        """One round: commands, messages, completions, deadlines. Sleeps at most `max_wait_s` (None: no limit)."""
        self._take_commands()
        if self._posts and self._clock() - self._driven_at > _STOPPED_S:
            self._listen(0.05)
        self._listen(self._timeout(max_wait_s))
        self._take_commands()
        self._drive_fabric()
        self._tick()

    def _listen(self, timeout_s: float | None) -> None:
        for event in self._channel.poll(timeout_s):
            self._last_progress = self._clock()
            if isinstance(event, Got):
                self._receive(event.key, event.data)
            elif isinstance(event, Up):
                self._greet(event.key)
            elif isinstance(event, Down):
                self._gone(event.key, "peer_gone", "the connection was lost")

    def busy(self) -> bool:
        """Bytes are in flight, from or to this rank."""
        return bool(
            self._posts
            or self._waiting_moments
            or self._landings.incoming()
            or self._rendezvous.being_read()
            or any(peer.busy() for peer in self._peers.values())
        )

    def open_counts(self) -> dict[str, int]:
        """What is held now, for leak checks and metrics."""
        return {
            "sources": self._rendezvous.open_count(),
            "landings": self._landings.open_count() + len(self._openings),
            "posts": len(self._posts),
            "peers": len(self._peers),
        }

    def close(self) -> None:
        for post in self._posts:
            if post.handle is not None:
                self._fabric.release(post.handle)
        self._posts.clear()
        self._channel.close()
        self._fabric.close()
        self._story.close()

    # -- commands ---------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            now = self._clock()
            if isinstance(command, cmd.Expect):
                self._requests.setdefault(command.transfer_id, command.request)
                self._run(self._rendezvous.expect(command.transfer_id, command.mode, command.fan_out, now))
            elif isinstance(command, cmd.Ready):
                if command.moment is not None and not command.moment.query():
                    self._waiting_moments.append(command)
                else:
                    self._ready(command)
            elif isinstance(command, cmd.Abort):
                self._abort(command)
            elif isinstance(command, cmd.Land):
                self._story.note(command.transfer_id, "allocated", tokens=command.end_token - command.start_token)
                due = now + self.config.connect_timeout_s
                opening = self._openings[command.request] = _Opening(command, due)
                self._dial(command.host, command.port)
                self._advance(opening)
            else:
                self._drop(command.request)

    def _abort(self, command: cmd.Abort) -> None:
        if self._requests.get(command.transfer_id, command.request) != command.request:
            return  # a second request under a transfer id in use: the first one stands
        self._run(self._rendezvous.abort(command.transfer_id, "aborted", command.reason, self._clock()))
        if not self._rendezvous.is_open(command.transfer_id):
            self._requests.pop(command.transfer_id, None)

    def _ready(self, command: cmd.Ready) -> None:
        owner = self._requests.setdefault(command.transfer_id, command.request)
        if owner != command.request:
            reason = f"transfer id already used by request {owner!r} on this engine"
            return self._end(
                cmd.Sent(command.request, command.transfer_id, False, "duplicate_transfer", reason), remember=False
            )
        if self.config.audit:
            digests = block_digests(self._layout, command.block_ids)
            self._story.note(command.transfer_id, "audit", first_block=0, digests=digests)
        now = self._clock()
        return self._run(self._rendezvous.ready(command.transfer_id, command.block_ids, command.num_tokens, now))

    def _drop(self, request: str) -> None:
        reason = "the request was aborted on the decode engine"
        opening = self._openings.get(request)
        if opening is not None:
            self._fail_opening(opening, "cancelled", reason)
        self._run(self._landings.cancel(request, reason, self._clock()))

    def _advance(self, opening: _Opening) -> None:
        """Open the landing as soon as P's rank 0 is up, or fail it if that can't be."""
        land = opening.land
        first = self._dial(land.host, land.port)
        if first.stage is Stage.REFUSED:
            return self._fail_opening(opening, *first.refusal)
        if first.stage is not Stage.UP or not isinstance(first.greeting, wire.Welcome):
            return None
        found = first.greeting
        if land.engine_id and land.engine_id != found.engine_id:
            reason = (
                f"remote_engine_id: the request says {land.engine_id!r}, {land.host}:{land.port} is {found.engine_id!r}"
            )
            return self._fail_opening(opening, "wrong_engine", reason)
        if land.tp_size and land.tp_size != found.tp_size:
            reason = f"remote_tp_size: the request says {land.tp_size}, {first.name} has {found.tp_size}"
            return self._fail_opening(opening, "wrong_tp_size", reason)
        me = self.identity
        peers = []
        for share in fan_in(me.rank, me.tp_size, found.tp_size, self._layout.total_heads):
            peer = self._dial(land.host, land.port + share.p_rank)
            peers.append((peer.key, legs_for(share.p_rank, found.tp_size, me.tp_size, self._layout.total_heads)))
        del self._openings[land.request]
        destination = landing.Destination(
            request=land.request,
            transfer_id=land.transfer_id,
            mode=land.mode,
            start_token=land.start_token,
            end_token=land.end_token,
            block_ids=land.block_ids,
            peers=tuple(dict(peers).items()),
        )
        up = {key for key, peer in self._peers.items() if peer.stage is Stage.UP}
        self._run(self._landings.open(destination, up, self._clock()))
        return None

    def _fail_opening(self, opening: _Opening, code: str, reason: str) -> None:
        land = opening.land
        del self._openings[land.request]
        self._story.note(land.transfer_id, "failed", code=code, reason=reason)
        result = cmd.Received(land.request, land.transfer_id, False, code, reason)
        self._end(result, remember=self._tells(land))

    def _tells(self, where: cmd.Land | landing.Destination) -> bool:
        """Whether this end is the transfer's: an empty registration awaits no KV, and vLLM makes one when it turns a
        request down."""
        return where.start_token < where.end_token or where.transfer_id not in self._endings

    # -- peers ------------------------------------------------------------------------------------------------------

    def _dial(self, host: str, port: int) -> Peer:
        key = self._channel.dial(host, port)
        peer = self._peers.get(key)
        if peer is None:
            now = self._clock()
            peer = self._peers[key] = Peer(key, Stage.DIALING, address=(host, port), heard_at=now, said_at=now)
        if peer.stage is Stage.DIALING:
            peer.heard_at, peer.redial_at = self._clock(), None
        return peer

    def _greet(self, key: str) -> None:
        peer = self._peers.get(key)
        if peer is None:
            return  # hung up meanwhile
        peer.stage = Stage.GREETING
        me = self.identity
        hello = wire.Hello(
            life=self.life,
            engine_id=me.engine_id,
            rank=me.rank,
            tp_size=me.tp_size,
            layout=self._layout,
            agent=self._metadata,
            scratch=self._scratch,
            silence_s=self.config.lease_s,
        )
        peer.heard_at = self._clock()
        self._send(key, hello)

    def _on_hello(self, key: str, hello: wire.Hello) -> None:
        me = self.identity
        self._gone(key, "peer_gone", "it greets anew", keep=True)
        for other in [p for p in self._peers.values() if p.address is None and p.greeting]:
            greeting = other.greeting
            if greeting and (greeting.engine_id, greeting.rank) == (hello.engine_id, hello.rank):
                self._gone(other.key, "peer_gone", "the engine was restarted")
        try:
            if me.role == "consumer":
                raise CompatError(f"{me.engine_id} is a kv_consumer and sends no KV", hint="dial a prefill engine")
            check_compatible(self._layout, hello.layout)
            fan_in(hello.rank, hello.tp_size, me.tp_size, self._layout.total_heads)
            agent = self._fabric.add_peer(hello.agent)
        except KVFerryError as error:
            reason = f"prefill engine {me.engine_id} refuses decode engine {hello.engine_id}: {error}"
            log.error("%s", reason)
            self._channel.send(key, codec.encode(wire.Refuse(code=error.code, reason=reason)))
            return
        now = self._clock()
        peer = Peer(key, Stage.WARMING, greeting=hello, agent=agent, heard_at=now, said_at=now)
        self._peers[key] = peer
        welcome = wire.Welcome(
            life=self.life,
            engine_id=me.engine_id,
            rank=me.rank,
            tp_size=me.tp_size,
            layout=self._layout,
            agent=self._metadata,
            scratch=self._scratch,
            silence_s=self.config.lease_s,
        )
        self._send(key, welcome)
        self._warm_up(peer, "WRITE")

    def _on_welcome(self, peer: Peer, welcome: wire.Welcome) -> None:
        peer.greeting = welcome
        try:
            check_compatible(self._layout, welcome.layout)
            peer.agent = self._fabric.add_peer(welcome.agent)
        except KVFerryError as error:
            reason = f"decode engine {self.identity.engine_id} refuses {peer.name}: {error}"
            return self._refused(peer, error.code, reason)
        peer.stage = Stage.WARMING
        return self._warm_up(peer, "READ")

    def _refused(self, peer: Peer, code: str, reason: str) -> None:
        if code == _CUT_OFF or peer.address is None:
            return self._gone(peer.key, "peer_gone", reason)
        log.error("%s", reason)
        self._gone(peer.key, code, reason, keep=True)
        self._peers[peer.key] = Peer(peer.key, Stage.REFUSED, refusal=(code, reason), address=peer.address)
        return self._advance_all()

    def _warm_up(self, peer: Peer, op: Op) -> None:
        """Make the fabric connect now: its first access can take seconds on a fresh pair."""
        assert peer.greeting is not None
        mine, theirs, size = (
            np.array([x], dtype=np.uint64) for x in (self._scratch, peer.greeting.scratch, SCRATCH_BYTES)
        )
        try:
            peer.warm_handle = self._fabric.post(op, peer.agent, mine, theirs, size, peer.layout.device)
        except FabricError as error:
            self._gone(peer.key, error.code, str(error))

    def _check_warm(self, peer: Peer) -> None:
        if peer.warm_handle is not None:
            try:
                done = self._fabric.check(peer.warm_handle)
            except FabricError as error:
                return self._gone(peer.key, error.code, f"the first access to {peer.name} failed: {error}")
            if not done:
                return None
            self._fabric.release(peer.warm_handle)
            peer.warm_handle = None
            peer.warmed = True
            self._send(peer.key, wire.Warm())
        if peer.warmed and peer.told_warm and peer.stage is Stage.WARMING:
            peer.stage = Stage.UP
            log.info("%s rank %d: connected to %s", self.identity.engine_id, self.identity.rank, peer.name)
            self._run(self._landings.connected(peer.key, self._clock()))
            self._advance_all()
        return None

    def _advance_all(self) -> None:
        for opening in list(self._openings.values()):
            self._advance(opening)

    def _gone(self, key: str, code: str, reason: str, *, keep: bool = False) -> None:
        """Cut the peer off, so that we post nothing more to it, and only then tell the machines.

        `keep`: leave the connection as it is; else it is closed, and dialled again later if it is wanted.
        """
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        now = self._clock()
        lost = [post for post in self._posts if post.peer == key]
        self._posts = [post for post in self._posts if post.peer != key]
        for post in lost:
            if post.handle is not None:
                self._fabric.release(post.handle)
        if peer.warm_handle is not None:
            self._fabric.release(peer.warm_handle)
        if peer.agent:
            self._fabric.remove_peer(peer.agent)
        text = f"{peer.name}: {reason}"
        if peer.stage is not Stage.DIALING:
            log.warning("%s rank %d: lost %s", self.identity.engine_id, self.identity.rank, text)
        for post in lost:
            if post.op == "WRITE":  # D hears why, if it can be reached
                self._run(self._rendezvous.write_failed(key, post.register.reg_id, text, now, code))
        self._run(self._landings.peer_gone(key, code, text, now))
        self._run(self._rendezvous.peer_gone(key, text, now))
        for post in lost:
            if post.op == "READ":
                self._run(self._landings.read_failed(post.register.reg_id, text, now))
        if keep:
            return
        if peer.address is None:
            self._channel.send(key, codec.encode(wire.Refuse(code=_CUT_OFF, reason=text)))
        self._channel.hang_up(key)
        if peer.address is not None and (peer.address in self._standing or self._wanted(peer)):
            lost_peer = Peer(key, Stage.DIALING, address=peer.address, heard_at=now, said_at=now)
            lost_peer.redial_at = now + _REDIAL_S
            self._peers[key] = lost_peer

    def _wanted(self, peer: Peer) -> bool:
        return any((o.land.host, o.land.port) == peer.address for o in self._openings.values())

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send(self, key: str, message: wire.Message) -> None:
        if self._channel.send(key, codec.encode(message)):
            peer = self._peers.get(key)
            if peer is not None:
                peer.said_at = self._clock()
        else:
            self._gone(key, "peer_gone", "the connection was lost")

    def _receive(self, key: str, data: bytes) -> None:
        if not data:
            return  # a probe of the connection
        try:
            message = codec.decode(data)
        except codec.WireError as error:
            log.error("%s rank %d: %s", self.identity.engine_id, self.identity.rank, error)
            self._channel.send(key, codec.encode(wire.Refuse(code="wire_error", reason=str(error))))
            return
        try:
            self._take(key, message)
        except UnexpectedEvent as error:  # the peer's fault: no reason to end this engine
            self._gone(key, error.code, str(error))

    def _take(self, key: str, message: wire.AnyMessage) -> None:
        now = self._clock()
        peer = self._peers.get(key)
        if peer is not None:
            peer.heard_at = now
        if isinstance(message, wire.Describe | wire.Abandon | wire.Why):
            self._answer(key, message)
        elif isinstance(message, wire.Hello):
            self._on_hello(key, message)
        elif peer is None:
            if isinstance(message, wire.Register | wire.Cancel | wire.Fetched | wire.Beat):
                refuse = wire.Refuse(code=_CUT_OFF, reason=f"{self.identity.engine_id} waits for a greeting")
                self._channel.send(key, codec.encode(refuse))
        elif isinstance(message, wire.Register):
            self._run(self._rendezvous.register(key, message, now))
        elif isinstance(message, wire.Cancel):
            self._run(self._rendezvous.cancel(key, message.reg_id, message.reason, now))
        elif isinstance(message, wire.Fetched):
            self._run(self._rendezvous.fetched(key, message.reg_id, message.ok, now))
        elif isinstance(message, wire.Begin):
            self._run(self._landings.begun(message.reg_id, now))
        elif isinstance(message, wire.Grant):
            self._run(self._landings.granted(message.reg_id, message.block_ids, now))
        elif isinstance(message, wire.Landed):
            self._run(self._landings.landed(message.reg_id, now))
        elif isinstance(message, wire.Failed):
            self._run(self._landings.failed(message.reg_id, message.code, message.reason, now))
        elif isinstance(message, wire.Welcome):
            self._on_welcome(peer, message)
        elif isinstance(message, wire.Warm):
            peer.told_warm = True
            self._check_warm(peer)
        elif isinstance(message, wire.Refuse):
            self._refused(peer, message.code, message.reason)

    def _answer(self, key: str, question: wire.Describe | wire.Abandon | wire.Why) -> None:
        reply: wire.Message
        if isinstance(question, wire.Describe):
            reply = wire.Description(
                engine_id=self.identity.engine_id,
                life=self.life,
                rank=self.identity.rank,
                tp_size=self.identity.tp_size,
                role=self.identity.role,
                mode=self.config.mode,
                block_size=self._layout.block_size,
                version=__version__,
            )
        elif isinstance(question, wire.Abandon):
            known = self._rendezvous.is_open(question.transfer_id)
            now = self._clock()
            self._run(self._rendezvous.abort(question.transfer_id, "abandoned", question.reason, now))
            reply = wire.Abandoned(transfer_id=question.transfer_id, known=known)
        else:
            transfer_id = question.transfer_id
            ending = self._endings.get(transfer_id)
            if self._rendezvous.is_open(transfer_id) or self._landings.is_open(transfer_id):
                state, code, reason = "open", "", ""
            elif ending is None:
                state, code, reason = "unknown", "", ""
            else:
                state, code, reason = "ok" if ending[0] else "failed", ending[1], ending[2]
            reply = wire.Verdict(transfer_id=transfer_id, state=state, code=code, reason=reason)
        self._channel.send(key, codec.encode(reply))

    # -- instructions -----------------------------------------------------------------------------------------------

    def _run(self, instructions: Iterable[rendezvous.Instruction | landing.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, rendezvous.Send):
                self._send(instruction.peer, instruction.message)
            elif isinstance(instruction, rendezvous.StartWrite):
                self._post("WRITE", instruction.peer, instruction.register, instruction.block_ids)
            elif isinstance(instruction, landing.StartRead):
                self._post("READ", instruction.peer, instruction.register, instruction.source_block_ids)
            elif isinstance(instruction, rendezvous.Note):
                self._story.note(instruction.transfer_id, instruction.event, reason=instruction.reason)
            elif isinstance(instruction, rendezvous.Release):
                self._released(instruction)
            elif isinstance(instruction, landing.CutPeer):
                self._gone(instruction.peer, "transfer_timeout", instruction.reason)
            else:
                self._landed(instruction)

    def _post(self, op: Op, key: str, register: wire.Register, source_block_ids: tuple[int, ...]) -> None:
        started = self._clock()
        peer = self._peers.get(key)
        if peer is None or peer.greeting is None:
            return self._ended(op, key, register.reg_id, "the peer went away before anything was posted", 0, 0)
        me, writing = self.identity, op == "WRITE"
        src, dst = (self._layout, peer.layout) if writing else (peer.layout, self._layout)
        p_rank, d_rank = (me.rank, peer.greeting.rank) if writing else (peer.greeting.rank, me.rank)
        p_tp, d_tp = (me.tp_size, peer.greeting.tp_size) if writing else (peer.greeting.tp_size, me.tp_size)
        descriptors = nbytes = 0
        handles = []
        try:
            for share in fan_in(d_rank, d_tp, p_tp, self._layout.total_heads):
                if share.p_rank != p_rank:
                    continue
                source = source_block_ids[register.start_token // src.block_size :]
                made = plan(src, dst, share, source, register.block_ids, register.start_token, register.end_token)
                if not made.descriptors:
                    continue
                local, remote = (made.src, made.dst) if writing else (made.dst, made.src)
                planned = self._clock()
                handles.append(self._fabric.post(op, peer.agent, local, remote, made.nbytes, peer.layout.device))
                descriptors += made.descriptors
                nbytes += made.total_bytes
        except PlanError as error:
            return self._ended(op, key, register.reg_id, str(error), 0, 0)
        except FabricError as error:
            # Some of its descriptors may be under way: it ends with the connection, which is of no use any more.
            self._posts.append(_Post(op, key, register, None, 0, 0, started))
            return self._gone(key, f"{op.lower()}_failed", str(error))
        if not handles:
            return self._ended(op, key, register.reg_id, "", 0, 0)
        now = self._clock()
        plan_ms, post_ms = (planned - started) * 1e3, (now - planned) * 1e3
        self._story.note(
            register.transfer_id,
            "posted",
            op=op,
            descriptors=descriptors,
            nbytes=nbytes,
            plan_ms=round(plan_ms, 3),
            post_ms=round(post_ms, 3),
        )
        for handle in handles:
            self._posts.append(_Post(op, key, register, handle, nbytes, descriptors, now))
        self._last_progress = self._driven_at = now
        return None

    def _ended(self, op: Op, key: str, reg_id: RegistrationId, error: str, nbytes: int, descriptors: int) -> None:
        now = self._clock()
        if op == "WRITE" and error:
            self._run(self._rendezvous.write_failed(key, reg_id, error, now))
        elif op == "WRITE":
            self._run(self._rendezvous.wrote(key, reg_id, now, nbytes=nbytes, descriptors=descriptors))
        elif error:
            self._run(self._landings.read_failed(reg_id, error, now))
        else:
            self._run(self._landings.read_done(reg_id, now))

    def _released(self, release: rendezvous.Release) -> None:
        self._story.note(release.transfer_id, "released", ok=release.ok, code=release.code, reason=release.reason)
        request = self._requests.pop(release.transfer_id, "")
        self._end(cmd.Sent(request, release.transfer_id, release.ok, release.code, release.reason))

    def _landed(self, outcome: landing.Outcome) -> None:
        where = outcome.destination
        if outcome.ok and self.config.audit:
            first = where.start_token // self._layout.block_size
            needed = -(-where.end_token // self._layout.block_size) - first
            digests = block_digests(self._layout, where.block_ids[:needed])
            self._story.note(where.transfer_id, "audit", first_block=first, digests=digests)
        result = cmd.Received(where.request, where.transfer_id, outcome.ok, outcome.code, outcome.reason)
        self._end(result, remember=self._tells(where))

    def _end(self, result: cmd.Result, *, remember: bool = True) -> None:
        if remember:
            self._endings[result.transfer_id] = (result.ok, result.code, result.reason)
        while len(self._endings) > _REMEMBERED_ENDINGS:
            self._endings.popitem(last=False)
        if not result.ok:
            log.warning(
                "%s rank %d: transfer %s failed: %s: %s",
                self.identity.engine_id,
                self.identity.rank,
                result.transfer_id,
                result.code,
                result.reason,
            )
        self._on_result(result)

    # -- fabric and time --------------------------------------------------------------------------------------------

    def _drive_fabric(self) -> None:
        if self._waiting_moments:
            passed = [ready for ready in self._waiting_moments if ready.moment is None or ready.moment.query()]
            self._waiting_moments = [ready for ready in self._waiting_moments if ready not in passed]
            for ready in passed:
                self._ready(ready)
        self._driven_at = self._clock()
        if not self.busy():
            return
        self._fabric.progress()
        for peer in [peer for peer in self._peers.values() if peer.stage is Stage.WARMING]:
            self._check_warm(peer)
        for post in list(self._posts):
            if post not in self._posts:
                continue  # went with its peer
            try:
                if post.handle is None or not self._fabric.check(post.handle):
                    if self._clock() - post.posted_at > self.config.transfer_timeout_s:
                        reason = f"a {post.op} took more than {self.config.transfer_timeout_s:g} s"
                        self._gone(post.peer, "transfer_timeout", reason)
                    continue
            except FabricError as failure:
                # Some of its descriptors may be under way still, and the fabric's connection is broken for all.
                self._gone(post.peer, f"{post.op.lower()}_failed", str(failure))
                continue
            self._last_progress = self._clock()
            self._fabric.release(post.handle)
            self._posts.remove(post)
            wire_ms = round((self._clock() - post.posted_at) * 1e3, 3)
            event = "written" if post.op == "WRITE" else "read"
            self._story.note(post.register.transfer_id, event, nbytes=post.nbytes, wire_ms=wire_ms)
            self._ended(post.op, post.peer, post.register.reg_id, "", post.nbytes, post.descriptors)

    def _timeout(self, max_wait_s: float | None) -> float | None:
        now = self._clock()
        if self._commands:
            return 0.0
        if self.busy():
            return 0.0 if now - self._last_progress < _SPIN_S else 0.001
        waits = [w - now for w in (self._rendezvous.next_due(), self._landings.next_due()) if w is not None]
        waits += [opening.due - now for opening in self._openings.values()]
        waits += [self._beat_due(peer) - now for peer in self._peers.values() if peer.stage is Stage.UP]
        waits += [peer.redial_at - now for peer in self._peers.values() if peer.redial_at is not None]
        if max_wait_s is not None:
            waits.append(max_wait_s)
        return max(0.0, min(waits)) if waits else None

    def _beat_due(self, peer: Peer) -> float:
        assert peer.greeting is not None
        return peer.said_at + min(peer.greeting.silence_s, self.config.lease_s) / 3

    def _tick(self) -> None:
        now = self._clock()
        self._run(self._rendezvous.tick(now))
        self._run(self._landings.tick(now))
        for opening in [o for o in self._openings.values() if o.due <= now]:
            land = opening.land
            peer = self._dial(land.host, land.port)
            heard = "accepts but does not answer" if peer.stage is Stage.GREETING else "cannot be reached"
            reason = f"side channel {land.host}:{land.port} {heard} within {self.config.connect_timeout_s:g} s"
            self._fail_opening(opening, "peer_unreachable", reason)
        for peer in list(self._peers.values()):
            if peer.redial_at is not None and peer.redial_at <= now and peer.address is not None:
                self._dial(*peer.address)
            unanswered = peer.stage in (Stage.DIALING, Stage.GREETING) and peer.address not in self._standing
            if unanswered and now - peer.heard_at > self.config.connect_timeout_s and not self._wanted(peer):
                self._gone(peer.key, "peer_unreachable", f"no answer within {self.config.connect_timeout_s:g} s")
            if peer.stage not in (Stage.UP, Stage.WARMING):
                continue
            if now - peer.heard_at > self.config.lease_s:
                self._gone(peer.key, "peer_gone", f"silent for {self.config.lease_s:g} s")
            elif self._beat_due(peer) <= now:
                self._send(peer.key, wire.Beat())
