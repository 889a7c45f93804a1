"""The transfer core of one rank: both directions, all I/O, one owner thread.

It joins the pure machines (`protocol/rendezvous.py`, `protocol/landing.py`) to a fabric and a side channel: commands
and channel events go in, the machines' instructions are carried out, and each request ends in exactly one `Result`.
Whoever calls `step` owns everything here. It sleeps in `channel.poll` unless bytes are in flight: only then is the
fabric driven.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvferry.config import ConnectorConfig
from kvferry.errors import FabricError, KVFerryError
from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol import codec, instructions, landing, rendezvous
from kvferry.protocol import messages as wire
from kvferry.protocol.layout import fan_in
from kvferry.protocol.plan import PlanError
from kvferry.protocol.stream import Span
from kvferry.protocol.table import UnexpectedEvent
from kvferry.story import Story
from kvferry.transfer import commands as cmd
from kvferry.transfer.answers import Answers, Question
from kvferry.transfer.areas import Areas
from kvferry.transfer.channel import Barred, Channel, Down, Got, Uninvited, Up
from kvferry.transfer.door import Door
from kvferry.transfer.endings import Endings
from kvferry.transfer.fabric import Fabric, Op
from kvferry.transfer.gather import Gatherer
from kvferry.transfer.invariants import check_when_idle
from kvferry.transfer.load import Load
from kvferry.transfer.mover import mover_for
from kvferry.transfer.openings import Openings
from kvferry.transfer.pacing import pace
from kvferry.transfer.peers import Identity, Peer, Peers, Stage
from kvferry.transfer.posts import LOST, Post, Posts
from kvferry.transfer.prober import Prober
from kvferry.transfer.pulls import Pulls
from kvferry.transfer.quarantine import Quarantine
from kvferry.transfer.scatter import Scatterer
from kvferry.transfer.stats import Recorder
from kvferry.transfer.verify import Verifier

log = logging.getLogger("kvferry.transfer")

_SPIN_S = 0.02  # after this long without progress the fabric is driven once a millisecond instead of all the time
_LOST_S = 0.01  # what nobody waits for is looked at this often
_STOPPED_S = 0.5  # after so long a pause (SIGSTOP) we may have been cut off meanwhile


class TransferCore:
    """See the module. `areas`: registered, on the layout's device.

    `on_result` is called on the owner thread. `clock`: monotonic seconds. `prober`: None where none is asked for.
    """

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        fabric: Fabric,
        channel: Channel,
        layout: wire.Layout,
        areas: Areas,
        story: Story,
        on_result: Callable[[cmd.Result], None],
        clock: Callable[[], float] = time.monotonic,
        prober: Prober | None = None,
    ) -> None:
        self.identity, self.config = identity, config
        self._prober = prober
        self._fabric, self._channel = fabric, channel
        self._layout = layout
        self._story, self._on_result, self._clock = story, on_result, clock
        self._rendezvous = rendezvous.Rendezvous(
            lease_s=config.lease_s, unseen_s=config.registration_timeout_s, patience_s=config.prefill_timeout_s
        )
        self._landings = landing.Landings(
            dial_s=config.connect_timeout_s,
            prefill_s=config.prefill_timeout_s,
            transfer_s=config.transfer_timeout_s,
            fence_s=config.lease_s,
        )
        self._commands: deque[cmd.Command] = deque()
        self.stats = Recorder(identity.rank)
        name = f"{identity.engine_id} rank {identity.rank}"
        self._door = Door(name, self._landings, self._rendezvous, self.stats, clock)
        mine = (identity, config, fabric, channel, layout, areas.scratch, clock, self._door)
        self._peers = Peers(
            *mine,
            lose=self._gone,
            up=self._peer_up,
            refused=lambda: self._openings.advance(),
            silent=lambda key, reason: self._run(self._landings.silent(key, reason, self._clock())),
            reached=lambda agent: self._posts.reach(agent),
        )
        self._pulls = Pulls(config, name, fabric, self._peers, areas.scratch, clock, lose=self._gone)
        self._openings = Openings(
            identity, config, layout, self._peers, clock, opened=self._opened, failed=self._not_opened
        )
        slots, mover, send = areas.staging, mover_for(layout.device), self._peers.send
        gatherer = Gatherer(slots, mover, fabric, send, clock)
        self._posts = Posts(identity, config, layout, fabric, gatherer, story, clock, self.stats)
        self._verifier = Verifier(identity, layout, config, self._posts.share_with, story, clock, self.stats)
        self._scatterer = Scatterer(slots, mover, self._landings.register_of, send)
        most = int(config.quarantine_share * layout.num_blocks)
        holders = (self._posts, self._scatterer)
        self._quarantine = Quarantine(most, config.lease_s, self._peers, self._landings, holders, fabric)
        self._waiting_moments: list[cmd.Ready | cmd.Grown] = []
        self._requests: dict[TransferId, str] = {}
        self._endings = Endings()
        self._load = Load(self._rendezvous, self._landings, self._openings, self._posts, self.stats, clock)
        known = (self._rendezvous, self._landings, self._endings, self._load)
        self._answers = Answers(identity, self._peers.life, config, layout, *known)
        self._last_progress = 0.0
        self._driven_at = 0.0
        self._peers.dial_standing()

    # -- any thread -------------------------------------------------------------------------------------------------

    def submit(self, command: cmd.Command) -> None:
        """Hand over a command; the owner takes it up in its next `step`."""
        self._commands.append(command)
        self._channel.wake()

    def wake(self) -> None:
        self._channel.wake()

    # -- the owner thread -------------------------------------------------------------------------------------------

    def step(self, max_wait_s: float | None) -> None:
        """One round: commands, messages, completions, deadlines. Sleeps at most `max_wait_s` (None: no limit)."""
        self._take_commands()
        if self._posts and self._clock() - self._driven_at > _STOPPED_S:
            self._listen(0.05)  # before we write on
        timeout_s = self._timeout(max_wait_s)
        self._load.tell(timeout_s)
        self._listen(timeout_s)
        self._take_commands()
        if self._prober is not None:
            self._say(self._prober.ended())
        self._drive_fabric()
        if timeout_s == 0.0:
            os.sched_yield()  # the side channel's own thread may wait for this core
        self._tick()
        if self.config.debug_invariants:
            check_when_idle(self)

    def _listen(self, timeout_s: float | None) -> None:
        for event in self._channel.poll(timeout_s):
            self._last_progress = self._clock()
            if isinstance(event, Got):
                self._receive(event.key, event.data)
            elif isinstance(event, Up):
                self._peers.greet(event.key)
            elif isinstance(event, Down):
                self._rendezvous.unwatch(event.key)
                self._peers.held.pop(event.key, None)
                self._gone(event.key, "peer_gone", "the connection was lost")
                if self._prober is not None:
                    self._prober.lost(event.key)
            elif isinstance(event, Barred):
                self._peers.barred(event.key, event.error)
            elif isinstance(event, Uninvited):
                self._door.uninvited(event.reason)

    def busy(self) -> bool:
        """Bytes are in flight, from or to this rank."""
        return bool(
            self._posts
            or self._waiting_moments
            or self._landings.incoming()
            or self._rendezvous.being_read()
            or self._peers.busy()
            or self._pulls.busy()
        )

    def pieces(self, nbytes: float, most: int) -> int:
        """Into how many pieces so much KV of one step should be cut. Any thread."""
        meter = self._posts.meter
        if self.config.stream_chunk_bytes:
            return max(1, min(most, int(nbytes / self.config.stream_chunk_bytes)))
        return meter.cost.pieces(nbytes / meter.bytes_per_descriptor, nbytes, most)

    def open_counts(self) -> dict[str, int]:
        """What is held now, for leak checks and metrics."""
        return {**self._load.counts(), "stages": len(self._scatterer), "peers": len(self._peers.by_key)}

    def close(self) -> None:
        if self._prober is not None:
            self._prober.close()
        self._posts.close()
        self._scatterer.close()
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
                expect = (command.transfer_id, command.mode, command.fan_out, now, command.num_tokens, command.prompt)
                self._run(self._rendezvous.expect(*expect))
            elif isinstance(command, cmd.Ready | cmd.Grown):
                self._waiting_moments.append(command)
                self._take_computed()
            elif isinstance(command, cmd.Rewind):
                self._rewind(command)
            elif isinstance(command, cmd.Abort):
                self._abort(command)
            elif isinstance(command, cmd.Land):
                taken = self.stats.allocated(command, self._layout.block_size)
                self._story.note(command.transfer_id, "allocated", **taken)
                self._openings.add(command)
            elif isinstance(command, cmd.Wait):
                self._announce(command)
            else:
                self._drop(command.request)

    def _abort(self, command: cmd.Abort) -> None:
        if self._requests.get(command.transfer_id, command.request) != command.request:
            return  # a second request under a transfer id in use: the first one stands
        how = (command.transfer_id, "aborted", command.reason, self._clock(), command.held)
        self._run(self._rendezvous.abort(*how))
        if not self._rendezvous.is_open(command.transfer_id) and command.transfer_id in self._requests:
            del self._requests[command.transfer_id]  # nothing was held, so no `Sent` tells of it
            ending = self._rendezvous.ending(command.transfer_id)
            if ending is not None:
                self._endings[command.transfer_id] = (False, ending.code, ending.reason)
                self.stats.count("prefill", ending.code)

    def _take_computed(self) -> None:
        """What the device has got to; of one transfer in the order of its steps, as new moments may pass meanwhile."""
        waiting, self._waiting_moments = self._waiting_moments, []
        for one in waiting:
            behind = any(earlier.transfer_id == one.transfer_id for earlier in self._waiting_moments)
            if behind or (one.moment is not None and not one.moment.query()):
                self._waiting_moments.append(one)
            else:
                self._computed(one)

    def _computed(self, command: cmd.Ready | cmd.Grown) -> None:
        if isinstance(command, cmd.Ready):
            return self._ready(command)
        if self._requests.get(command.transfer_id) != command.request:
            return None
        grown = (command.transfer_id, command.block_ids, command.tokens, self._clock(), command.planes)
        return self._run(self._rendezvous.grown(*grown))

    def _rewind(self, command: cmd.Rewind) -> None:
        if self._requests.get(command.transfer_id) != command.request:
            return self._on_result(cmd.Rewound(command.request, command.transfer_id))
        self._waiting_moments = [one for one in self._waiting_moments if one.transfer_id != command.transfer_id]
        self._verifier.rewound(command.transfer_id)
        return self._run(self._rendezvous.rewind(command.transfer_id, self._clock()))

    def _ready(self, command: cmd.Ready) -> None:
        owner = self._requests.setdefault(command.transfer_id, command.request)
        if owner != command.request:
            reason = f"transfer id already used by request {owner!r} on this engine"
            return self._end(
                cmd.Sent(command.request, command.transfer_id, False, "duplicate_transfer", reason), remember=False
            )
        self._verifier.audit(command.transfer_id, command.block_ids)
        now = self._clock()
        return self._run(self._rendezvous.ready(command.transfer_id, command.block_ids, command.num_tokens, now))

    def _announce(self, wait: cmd.Wait) -> None:
        """Tell the P ranks that we will register with. Those not connected now learn of it by the registration."""
        first = self._peers.by_address(wait.host, wait.port)
        if first is None or first.greeting is None or first.stage is not Stage.UP:
            return
        me = self.identity
        for share in fan_in(me.rank, me.tp_size, first.greeting.tp_size, self._layout.total_heads):
            peer = self._peers.by_address(wait.host, wait.port + share.p_rank)
            if peer is not None and peer.stage is Stage.UP:
                self._peers.send(peer.key, wire.Waiting(transfer_id=wait.transfer_id))

    def _drop(self, request: str) -> None:
        reason = "the request was aborted on the decode engine"
        self._openings.cancel(request, reason)
        self._run(self._landings.cancel(request, reason, self._clock()))

    def _opened(self, destination: landing.Destination) -> None:
        self._run(self._landings.open(destination, self._peers.up_keys(), self._clock()))

    def _not_opened(self, land: cmd.Land, code: str, reason: str) -> None:
        self._story.note(land.transfer_id, "failed", code=code, reason=reason)
        self._end(cmd.Received(land.request, land.transfer_id, False, code, reason), remember=self._tells(land))

    def _tells(self, where: cmd.Land | landing.Destination) -> bool:
        """Whether this end is the transfer's: an empty registration awaits no KV, and vLLM makes one when it turns a
        request down."""
        return where.start_token < where.end_token or where.transfer_id not in self._endings

    # -- peers ------------------------------------------------------------------------------------------------------

    def _gone(self, key: str, code: str, reason: str, keep: bool = False) -> None:
        """Cut the peer off, so that we post nothing more to it, and only then tell the machines.

        `keep`: leave the connection as it is; else it is closed, and dialled again later if it is wanted.
        """
        peer = self._peers.by_key.get(key)
        if peer is None:
            return
        now = self._clock()
        lost = self._posts.drop(key)
        self._verifier.gone(key)
        self._pulls.lost(key)
        self._scatterer.lost(key)
        text = self._peers.cut(peer, reason, keep_agent=self._posts.reach(peer.agent))
        for post in lost:
            if post.op == "WRITE":  # D hears why, if it can be reached
                over, reg_id = not post.in_flight, post.register.reg_id
                self._run(self._rendezvous.write_failed(key, reg_id, text, now, code, lost=True, over=over))
            elif post.in_flight:
                self._channel.send(key, codec.encode(wire.Fetched(reg_id=post.register.reg_id, ok=False)))
        self._run(self._landings.peer_gone(key, code, text, now))
        self._run(self._rendezvous.peer_gone(key, text, now))
        for post in [post for post in lost if post.op == "READ" and not post.in_flight]:
            self._run(self._landings.read_failed(post.register.reg_id, text, now))
        if not keep:
            self._peers.hang_up(peer, text, self._wanted(peer))

    def _lost_is_over(self, post: Post) -> None:
        """Nothing of it can arrive any more, wherever it was to go."""
        if post.op == "READ":
            self._run(self._landings.read_failed(post.register.reg_id, "P was lost meanwhile", self._clock()))
        if not self._posts.reach(post.peer.agent):
            self._peers.nothing_reaches(post.peer.agent)

    def _peer_up(self, key: str) -> None:
        self._pulls.met(self._peers.by_key[key])
        self._run(self._landings.connected(key, self._clock()))
        self._openings.advance()

    def _wanted(self, peer: Peer) -> bool:
        """A request waits for it, or it may still write to us and must say that it doesn't."""
        return self._landings.settling(peer.key) or self._openings.want(peer)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, key: str, data: bytes) -> None:
        if not data:
            return  # a probe of the connection
        try:
            message = self._door.read(data)
        except codec.WireError as error:
            self._channel.send(key, codec.encode(wire.Refuse(code="wire_error", reason=str(error))))
            return
        try:
            self._take(key, message)
        except (UnexpectedEvent, PlanError, ArithmeticError, ValueError, TypeError, LookupError) as error:
            # Numbers that pass the codec and make no sense further in: whatever a peer sends, this engine lives.
            reason = f"its {type(message).__name__} could not be used: {error}"
            self._door.turned_away("unusable", reason)
            self._gone(key, error.code if isinstance(error, KVFerryError) else "bad_message", reason)

    def _take(self, key: str, message: wire.AnyMessage) -> None:
        now = self._clock()
        peer = self._peers.by_key.get(key)
        if peer is not None:
            peer.heard_at = now
            if peer.stage is Stage.SILENT:
                peer.stage = Stage.UP
        if not self._door.admits(peer, message):
            if peer is None and isinstance(message, wire.Register | wire.Cancel | wire.Fetched | wire.Beat):
                self._peers.stranger(key)
        elif isinstance(message, Question):
            self._channel.send(key, codec.encode(self._answers.to(message)))
        elif isinstance(message, wire.Abandon):
            self._abandon(key, message)
        elif isinstance(message, wire.Watch):
            self._run(self._rendezvous.watch(key, message.transfer_id, message.percent, now))
        elif isinstance(message, wire.Probe | wire.ProbeStep):
            if self._prober is not None:
                self._say(self._prober.take(key, message))
        elif isinstance(message, wire.Hello):
            self._peers.hello(key, message)
        elif peer is None:
            return
        elif isinstance(message, wire.Register):
            share, meter = self._posts.share_with("WRITE", peer), self._posts.meter
            how = pace(self.config, self._layout, peer.layout, share, meter)
            reads = message.mode == "pull" and self._pulls.reads(peer)
            self._run(self._rendezvous.register(key, message, now, how, reads))
            self._verifier.foresee("WRITE", peer, message)
        elif isinstance(message, wire.Waiting):
            self._run(self._rendezvous.waiting(key, message.transfer_id, now))
        elif isinstance(message, wire.Cancel):
            self._run(self._rendezvous.cancel(key, message.reg_id, message.reason, now))
        elif isinstance(message, wire.Fetched):
            self._run(self._rendezvous.fetched(key, message.reg_id, message.ok, now))
        elif isinstance(message, wire.Begin):
            self._run(self._landings.begun(message.reg_id, message.sealed, now))
        elif isinstance(message, wire.Seal):
            self._run(self._landings.sealed(message.reg_id, now))
        elif isinstance(message, wire.Grant):
            self._run(self._landings.granted(message.reg_id, message.block_ids, now))
        elif isinstance(message, wire.Landed):
            self._landed_by(peer, message)
        elif isinstance(message, wire.Failed):
            self._run(self._landings.failed(message.reg_id, message.code, message.reason, now, message.final))
        elif isinstance(message, wire.StageStep):
            self._stage(peer, message)
        elif isinstance(message, wire.Look):
            self._pulls.look(peer)
        elif isinstance(message, wire.Looked):
            self._pulls.looked(peer, message)
        elif isinstance(message, wire.Welcome):
            self._peers.welcome(peer, message)
        elif isinstance(message, wire.Warm):
            self._peers.warm(peer, message)
        elif isinstance(message, wire.Refuse):
            self._peers.refuse(peer, message.code, message.reason)

    def _stage(self, peer: Peer, message: wire.StageStep) -> None:
        if isinstance(message, wire.StageAsk):
            self._scatterer.asked(peer, message, self._posts.route("READ", peer))
        elif isinstance(message, wire.StageLent):
            self._posts.gatherer.lent(peer.key, message)
        elif isinstance(message, wire.Staged):
            self._scatterer.staged(peer, message)
        elif isinstance(message, wire.Unstaged):
            self._posts.gatherer.unstaged(peer.key, message)

    def _landed_by(self, peer: Peer, message: wire.Landed) -> None:
        """All WRITEs have completed, P says. If it is not what we registered for and P computed, it is no success."""
        register, read = self._landings.register_of(message.reg_id, peer.key), self._landings.reads(message.reg_id)
        code, reason = self._verifier.fault(peer, register, message, read) if register is not None else ("", "")
        if code:
            return self._run(self._landings.failed(message.reg_id, code, reason, self._clock()))
        return self._run(self._landings.landed(message.reg_id, self._clock()))

    def _abandon(self, key: str, question: wire.Abandon) -> None:
        what, why, now = question.transfer_id, question.reason, self._clock()
        known = self._rendezvous.is_open(what) or self._landings.is_open(what)
        self._run(self._rendezvous.abort(what, "abandoned", why, now))
        self._run(self._landings.abandon(what, why, now))
        self._channel.send(key, codec.encode(wire.Abandoned(transfer_id=what, known=known)))

    def _say(self, messages: Iterable[tuple[str, wire.Message]]) -> None:
        for key, message in messages:
            self._channel.send(key, codec.encode(message))

    # -- instructions -----------------------------------------------------------------------------------------------

    def _run(self, todo: Iterable[rendezvous.Instruction | landing.Instruction]) -> None:
        for instruction in todo:
            if isinstance(instruction, instructions.Send):
                self._send(instruction.peer, instruction.message)
            elif isinstance(instruction, instructions.StartWrite):
                self._post("WRITE", instruction.peer, instruction.register, instruction.block_ids, instruction.span)
            elif isinstance(instruction, landing.StartRead):
                register = instruction.register
                whole = Span(register.start_token, register.end_token)
                self._post("READ", instruction.peer, register, instruction.source_block_ids, whole)
            elif isinstance(instruction, instructions.Tell):
                self._channel.send(instruction.asker, codec.encode(instruction.message))
            elif isinstance(instruction, instructions.Rewound):
                request = self._requests.get(instruction.transfer_id, "")
                self._on_result(cmd.Rewound(request, instruction.transfer_id))
            elif isinstance(instruction, instructions.Note):
                self._story.note(instruction.transfer_id, instruction.event, reason=instruction.reason)
            elif isinstance(instruction, instructions.Release):
                self._released(instruction)
            elif isinstance(instruction, landing.Doomed):
                self._doomed(instruction)
            else:
                self._landed(instruction)

    def _send(self, key: str, message: wire.Message) -> None:
        peer = self._peers.by_key.get(key)
        if isinstance(message, wire.Grant):
            self.stats.pulled("read")
        if self._peers.send(key, self._verifier.closing(key, message)) and peer is not None:
            self._verifier.said(peer, message, self._rendezvous.register_of)

    def _post(self, op: Op, key: str, register: wire.Register, source_block_ids: tuple[int, ...], span: Span) -> None:
        peer = self._peers.by_key.get(key)
        if peer is None or peer.greeting is None:
            return self._ended(op, key, register.reg_id, "the peer went away before anything was posted")
        try:
            posted = self._posts.start(op, peer, register, source_block_ids, span)
        except PlanError as error:
            return self._ended(op, key, register.reg_id, str(error))
        except FabricError as error:
            return self._gone(key, f"{op.lower()}_failed", str(error))
        if not posted:
            return self._ended(op, key, register.reg_id)
        if register.mode == "pull" and op == "WRITE":
            self.stats.pulled("write")
        if op == "WRITE":
            self._verifier.took(peer, register, source_block_ids, span)
        self._last_progress = self._driven_at = self._clock()
        return None

    def _ended(
        self, op: Op, key: str, reg_id: RegistrationId, error: str = "", nbytes: int = 0, descriptors: int = 0
    ) -> None:
        now = self._clock()
        if op == "WRITE" and error:
            self._run(self._rendezvous.write_failed(key, reg_id, error, now))
        elif op == "WRITE":
            self._run(self._rendezvous.wrote(key, reg_id, now, nbytes=nbytes, descriptors=descriptors))
        elif error:
            self._run(self._landings.read_failed(reg_id, error, now))
        else:
            self._run(self._landings.read_done(reg_id, now))

    def _released(self, release: instructions.Release) -> None:
        self._story.note(release.transfer_id, "released", ok=release.ok, code=release.code, reason=release.reason)
        request = self._requests.pop(release.transfer_id, "")
        self._end(cmd.Sent(request, release.transfer_id, release.ok, release.code, release.reason))

    def _landed(self, outcome: landing.Outcome) -> None:
        where = outcome.destination
        if outcome.ok:
            first, end = where.start_token // self._layout.block_size, -(-where.end_token // self._layout.block_size)
            self._verifier.audit(where.transfer_id, where.block_ids[: end - first], first)
        result = cmd.Received(where.request, where.transfer_id, outcome.ok, outcome.code, outcome.reason)
        self._end(result, remember=self._tells(where))

    def _doomed(self, doomed: landing.Doomed) -> None:
        where = doomed.destination
        if self._tells(where):
            self._endings[where.transfer_id] = (False, doomed.code, doomed.reason)
            self.stats.doomed(where.request, doomed.code)
        log.warning("%s: %s: its blocks are kept until its writer is heard of", where.transfer_id, doomed.reason)
        self._on_result(cmd.Failing(where.request, where.transfer_id, doomed.code, doomed.reason))

    def _end(self, result: cmd.Sent | cmd.Received, *, remember: bool = True) -> None:
        if remember:
            self._endings[result.transfer_id] = (result.ok, result.code, result.reason)
        self.stats.ended(result, counts=remember)
        if not result.ok:
            log.warning(
                "%s rank %d: transfer %s failed: %s: %s",
                self.identity.engine_id,
                self.identity.rank,
                result.transfer_id,
                result.code,
                result.reason,
            )
        self._load.tell()
        self._on_result(result)

    # -- fabric and time --------------------------------------------------------------------------------------------

    def _drive_fabric(self) -> None:
        self._take_computed()
        self._driven_at = self._clock()
        if not self.busy():
            return
        self._peers.noted(self._fabric.progress())
        self._peers.drive()
        self._pulls.drive()
        self._scatterer.drive()
        for post, code, reason in self._posts.poll():
            if code == LOST:
                self._lost_is_over(post)
            elif code:
                self._gone(post.peer.key, code, reason)
            else:
                self._last_progress = self._clock()
                nbytes = post.plan.total_bytes
                self._ended(post.op, post.peer.key, post.register.reg_id, "", nbytes, post.descriptors)

    def _timeout(self, max_wait_s: float | None) -> float | None:
        now = self._clock()
        if self._commands:
            return 0.0
        if self.busy():
            soon = _LOST_S if self._posts.only_lost() and not self._peers.busy() else 0.001
            return 0.0 if now - self._last_progress < _SPIN_S else soon
        waits = [w - now for w in (self._rendezvous.next_due(), self._landings.next_due()) if w is not None]
        waits += [due - now for due in [*self._openings.due(), *self._pulls.due()]]
        waits += self._peers.waits(now)
        if max_wait_s is not None:
            waits.append(max_wait_s)
        return max(0.0, min(waits)) if waits else None

    def _tick(self) -> None:
        now = self._clock()
        self._run(self._rendezvous.tick(now))
        self._run(self._landings.tick(now, self._peers.may_write))
        self._openings.tick(now)
        self._scatterer.tidy()
        self._peers.tick(now, self._wanted)
        self._pulls.tick(now, at_rest=not self.busy())
        self._run(self._quarantine.relieve(now, self._gone))
