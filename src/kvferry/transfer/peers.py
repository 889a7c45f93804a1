"""Who we are connected to: greeting, warm-up, heartbeats, death.

A decode rank dials a prefill rank and says `Hello`; the prefill rank checks that the two fit, adds the agent and says
`Welcome`; then each makes one small access to the other's scratch memory, so that the fabric's connections exist
before the first real transfer, and says `Warm`. P's access carries a note, which comes out of the agent that D has
named: D says it back over the side channel, and so shows that agent and memory are its own. Owned by the transfer
core's thread.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.config import ConnectorConfig, parse_address
from kvferry.errors import CompatError, FabricError, KeyRefused, KVFerryError
from kvferry.ids import EngineId, new_life_id
from kvferry.protocol import codec
from kvferry.protocol.layout import check_compatible, check_sane, fan_in
from kvferry.protocol.messages import Beat, Greeting, Hello, Layout, Message, Refuse, Warm, Welcome
from kvferry.transfer.areas import SCRATCH_BYTES
from kvferry.transfer.channel import Channel
from kvferry.transfer.fabric import Fabric, Handle, Note, Op, PeerName

if TYPE_CHECKING:
    from kvferry.transfer.door import Door

log = logging.getLogger("kvferry.transfer")

CUT_OFF = "cut_off"  # code of a `Refuse` that means: greet me anew
_REDIAL_SOON_S = 0.05  # one that may still write to us
_REDIAL_S = 0.5  # pause before a lost peer is dialled again; a request that wants it dials at once
_BARRED_S = 2.0  # so long one that has another key is not dialled, and requests that want it fail at once
_MOST_EARLY = 256

_MIN_BEAT_S = 0.1  # however short the other side says its patience is
Lose = Callable[[str, str, str, bool], None]


@dataclass(frozen=True)
class Identity:
    """Which rank this is. `role`: 'producer', 'consumer' or 'both'."""

    engine_id: EngineId
    rank: int
    tp_size: int
    role: str


class Stage(Enum):
    DIALING = auto()  # no connection yet
    GREETING = auto()  # Hello sent
    WARMING = auto()  # agents exchanged, first accesses under way
    UP = auto()
    SILENT = auto()  # dialled, up, and not heard of for too long: it may be stopped in the middle of a WRITE
    REFUSED = auto()  # the other side will not talk to us; kept so that requests fail at once, with the reason


@dataclass
class Peer:
    """One rank on the other side. Times are the core's monotonic seconds."""

    key: str
    stage: Stage
    greeting: Hello | Welcome | None = None
    agent: PeerName = ""
    warm_handle: Handle | None = None
    note: bytes = b""  # sent with P's first access; on D: come with it
    warmed: bool = False
    told_warm: bool = False
    refusal: tuple[str, str] = ("", "")
    heard_at: float = 0.0
    said_at: float = 0.0
    met_at: float = 0.0  # agents were exchanged
    address: tuple[str, int] | None = None  # of peers that we dialled
    redial_at: float | None = None  # DIALING and REFUSED: not before then

    @property
    def layout(self) -> Layout:
        assert self.greeting is not None
        return self.greeting.layout

    @property
    def name(self) -> str:
        """For messages to people."""
        who = f"{self.greeting.engine_id} rank {self.greeting.rank}" if self.greeting else "engine"
        return f"{who} at {self.dialled}" if self.dialled else who

    @property
    def dialled(self) -> str:
        """The address that we dialled, '' if the peer dialled us."""
        return f"{self.address[0]}:{self.address[1]}" if self.address else ""


_BEATING = (Stage.UP, Stage.SILENT)


def replaces(hello: Hello, other: Greeting | None) -> bool:
    """Whether a rank that says `hello` can't be on the other connection any more."""
    if not isinstance(other, Hello) or (other.engine_id, other.rank) != (hello.engine_id, hello.rank):
        return False
    return other.life != hello.life or other.dialled == hello.dialled


class Peers:
    """Everyone this rank is, or wants to be, connected to, by channel key.

    `lose(key, code, reason, keep)`: the owner's way to cut a peer off; it calls `cut` and `hang_up` here in between its
    own bookkeeping. `up(key)`: a peer can be used. `refused()`: some peer will not talk to us. `silent(key, reason)`:
    one that may be writing to us is not heard of any more. `reached(agent)`: copies from or to it are in flight though
    its peer was given up.
    """

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        fabric: Fabric,
        channel: Channel,
        layout: Layout,
        scratch: int,
        clock: Callable[[], float],
        door: Door,
        *,
        lose: Lose,
        up: Callable[[str], None],
        refused: Callable[[], None],
        silent: Callable[[str, str], None],
        reached: Callable[[PeerName], bool],
    ) -> None:
        self.held: dict[str, Hello] = {}
        """Greetings that wait until nothing that we posted before can reach who greets."""
        self.by_key: dict[str, Peer] = {}
        self.life = new_life_id()
        self._identity, self._config, self._layout, self._scratch = identity, config, layout, scratch
        self._fabric, self._channel, self._clock = fabric, channel, clock
        self._metadata, self._door = fabric.metadata(), door
        self._early: dict[PeerName, bytes] = {}  # notes from agents whose welcome is still to come
        self._barred: set[str] = set()  # what was said of keys that differ: once
        self._lose, self._up, self._refused, self._silent = lose, up, refused, silent
        self._reached = reached
        self._standing = {parse_address(peer, "peers") for peer in config.peers}

    def dial_standing(self) -> None:
        """Connect to the configured peers, off any request's path."""
        for host, port in sorted(self._standing):
            self.dial(host, port)

    def by_address(self, host: str, port: int) -> Peer | None:
        """The peer that was dialled there, if any."""
        return next((peer for peer in self.by_key.values() if peer.address == (host, port)), None)

    def up_keys(self) -> set[str]:
        return {key for key, peer in self.by_key.items() if peer.stage is Stage.UP}

    def busy(self) -> bool:
        """The fabric must be driven for a peer's sake."""
        return any(peer.stage is Stage.WARMING for peer in self.by_key.values())

    def dial(self, host: str, port: int) -> Peer:
        known = self.by_address(host, port)
        if known is not None and known.stage is Stage.REFUSED and known.redial_at is not None:
            return known
        key = self._channel.dial(host, port)
        peer = self.by_key.get(key)
        if peer is None:
            now = self._clock()
            peer = self.by_key[key] = Peer(key, Stage.DIALING, address=(host, port), heard_at=now, said_at=now)
        if peer.stage is Stage.DIALING:
            peer.heard_at, peer.redial_at = self._clock(), None
        return peer

    def send(self, key: str, message: Message) -> bool:
        """Whether it has left. What can't be sent means that the peer is lost: the one that has its key afterwards, if
        any, is being dialled anew, and to such a one nothing can be sent."""
        peer = self.by_key.get(key)
        if peer is not None and peer.stage is Stage.DIALING:
            return False
        if not self._channel.send(key, codec.encode(message)):
            self._lose(key, "peer_gone", "the connection was lost", False)
            return False
        if peer is not None:
            peer.said_at = self._clock()
        return True

    def _introduction(self) -> dict[str, Any]:
        """The fields of a `Greeting`."""
        me = self._identity
        return {
            "life": self.life,
            "engine_id": me.engine_id,
            "rank": me.rank,
            "tp_size": me.tp_size,
            "layout": self._layout,
            "agent": self._metadata,
            "scratch": self._scratch,
            "silence_s": self._config.lease_s,
            "pull_by": self._config.pull_by_now,
        }

    def greet(self, key: str) -> None:
        peer = self.by_key.get(key)
        if peer is None:
            return  # hung up meanwhile
        peer.stage = Stage.GREETING
        peer.heard_at = self._clock()
        self.send(key, Hello(dialled=peer.dialled, **self._introduction()))

    def hello(self, key: str, hello: Hello) -> None:
        me = self._identity
        self._lose(key, "peer_gone", "it greets anew", True)
        for other in [other for other in self.by_key.values() if replaces(hello, other.greeting)]:
            self._lose(other.key, "peer_gone", "it came back on another connection", False)
        try:
            if me.role == "consumer":
                raise CompatError(f"{me.engine_id} is a kv_consumer and sends no KV", hint="dial a prefill engine")
            check_sane(hello.layout)
            check_compatible(self._layout, hello.layout)
            fan_in(hello.rank, hello.tp_size, me.tp_size, self._layout.total_heads)
            agent = self._fabric.add_peer(hello.agent)
            self._check_agent(agent, hello)
            self.held.pop(key, None)
            if self._reached(agent):
                self.held[key] = hello  # a welcome says that nothing of ours can arrive there any more
                return
        except KVFerryError as error:
            reason = f"prefill engine {me.engine_id} refuses decode engine {hello.engine_id}: {error}"
            self._door.turned_away("bad_greeting", reason)
            self._channel.send(key, codec.encode(Refuse(code=error.code, reason=reason)))
            return
        now = self._clock()
        peer = Peer(key, Stage.WARMING, greeting=hello, agent=agent, heard_at=now, said_at=now, met_at=now)
        peer.note = secrets.token_bytes(16)
        self.by_key[key] = peer
        if self.send(key, Welcome(**self._introduction())):
            self._warm_up(peer, "WRITE")

    def _check_agent(self, agent: PeerName, hello: Hello) -> None:
        """Losing a peer removes its agent, so nobody may come with another's."""
        for other in self.by_key.values():
            if other.agent == agent and other.greeting is not None and other.greeting.life != hello.life:
                raise CompatError(f"agent {agent} belongs to {other.name}", hint="each rank has its own")

    def welcome(self, peer: Peer, welcome: Welcome) -> None:
        if peer.warm_handle is not None:  # it welcomes anew
            self._fabric.release(peer.warm_handle)
        peer.greeting, peer.warm_handle, peer.note, peer.warmed, peer.told_warm = welcome, None, b"", False, False
        try:
            check_sane(welcome.layout)
            check_compatible(self._layout, welcome.layout)
            peer.agent = self._fabric.add_peer(welcome.agent)
        except KVFerryError as error:
            reason = f"decode engine {self._identity.engine_id} refuses {peer.name}: {error}"
            self._door.turned_away("bad_greeting", reason)
            return self.refuse(peer, error.code, reason)
        peer.stage, peer.note, peer.met_at = Stage.WARMING, self._early.pop(peer.agent, b""), self._clock()
        return self._warm_up(peer, "READ")

    def refuse(self, peer: Peer, code: str, reason: str) -> None:
        if code == CUT_OFF or peer.address is None:
            return self._lose(peer.key, "peer_gone", reason, False)
        log.error("%s", reason)
        self._lose(peer.key, code, reason, True)
        self.by_key[peer.key] = Peer(peer.key, Stage.REFUSED, refusal=(code, reason), address=peer.address)
        return self._refused()

    def barred(self, key: str, error: KeyRefused) -> None:
        """A listener has another key: its requests fail at once, and it is asked again in a while."""
        peer = self.by_key.get(key)
        if peer is None:
            return
        refusal, now = (error.code, str(error)), self._clock()
        if refusal[1] not in self._barred:
            self._barred.add(refusal[1])
            log.error("%s rank %d: %s", self._identity.engine_id, self._identity.rank, error)
        self._lose(key, *refusal, True)
        address, again = peer.address, now + _BARRED_S
        self.by_key[key] = Peer(key, Stage.REFUSED, refusal=refusal, address=address, redial_at=again)
        self._refused()

    def _warm_up(self, peer: Peer, op: Op) -> None:
        """Make the fabric connect now: its first access can take seconds on a fresh pair."""
        assert peer.greeting is not None
        note = peer.note if op == "WRITE" else b""
        mine, theirs, size = (
            np.array([x], dtype=np.uint64) for x in (self._scratch, peer.greeting.scratch, SCRATCH_BYTES)
        )
        try:
            peer.warm_handle = self._fabric.post(op, peer.agent, mine, theirs, size, peer.layout.device, note)
        except FabricError as error:
            self._lose(peer.key, error.code, str(error), False)

    def check_warm(self, peer: Peer) -> None:
        if peer.warm_handle is not None:
            try:
                done = self._fabric.check(peer.warm_handle)
            except FabricError as error:
                return self._lose(peer.key, error.code, f"the first access to {peer.name} failed: {error}", False)
            if not done:
                return None
            self._fabric.release(peer.warm_handle)
            peer.warm_handle = None
        dialled = peer.address is not None
        due = peer.note if dialled else peer.told_warm  # P is the last to say it, so that D drives its agent until then
        if peer.warm_handle is None and peer.stage is Stage.WARMING and not peer.warmed and due:
            peer.warmed = True
            if not self.send(peer.key, Warm(echo=peer.note) if dialled else Warm()):
                return None
        if peer.warmed and peer.told_warm and peer.stage is Stage.WARMING:
            peer.stage = Stage.UP
            log.info("%s rank %d: connected to %s", self._identity.engine_id, self._identity.rank, peer.name)
            self._up(peer.key)
        return None

    def warm(self, peer: Peer, warm: Warm) -> None:
        """Its first access has gone through. On P: it must say what came with ours to the agent that it has named."""
        if peer.address is None and warm.echo != peer.note:
            return self._door.turned_away("bad_greeting", f"{peer.name} can't show that the agent it names is its own")
        peer.told_warm = True
        return self.check_warm(peer)

    def noted(self, notes: Sequence[Note]) -> None:
        """What came with others' accesses to our memory."""
        for agent, note in notes:
            here = [one for one in self.by_key.values() if one.agent == agent and one.stage is Stage.WARMING]
            peers = [one for one in here if one.address is not None]
            for peer in peers:
                peer.note, peer.warmed = note, False
                self.check_warm(peer)
            if not peers:  # it may be quicker than the welcome
                self._early[agent] = note
                while len(self._early) > _MOST_EARLY:
                    del self._early[next(iter(self._early))]

    def nothing_reaches(self, agent: PeerName) -> None:
        """What we had posted before its peer was given up has ended."""
        if all(other.agent != agent for other in self.by_key.values()):
            self._fabric.remove_peer(agent)
        for key, hello in list(self.held.items()):
            self.hello(key, hello)

    def renewed(self) -> None:
        """Our agent is another one."""
        self._metadata = self._fabric.metadata()
        self.held.clear()

    def may_write(self, key: str) -> bool:
        """A lost peer's address answers, but who is there has not welcomed us (again): it may be the one that we lost,
        with WRITEs in flight. A dead one's doesn't answer, and its sockets are closed."""
        peer = self.by_key.get(key)
        return peer is not None and peer.stage in (Stage.DIALING, Stage.GREETING) and self._channel.answers(key)

    def cut(self, peer: Peer, reason: str, *, keep_agent: bool) -> str:
        """Nothing more can be posted to it, and its agent is forgotten, unless some posts are in flight. What to tell
        people."""
        del self.by_key[peer.key]
        if peer.warm_handle is not None:
            self._fabric.release(peer.warm_handle)
        if peer.agent and not keep_agent and all(other.agent != peer.agent for other in self.by_key.values()):
            self._fabric.remove_peer(peer.agent)
        if peer.stage is not Stage.DIALING:
            log.warning("%s rank %d: lost %s: %s", self._identity.engine_id, self._identity.rank, peer.name, reason)
        return f"{peer.name}: {reason}"

    def hang_up(self, peer: Peer, text: str, wanted: bool) -> None:
        """Close its connection, and dial it again later if it is a standing or a wanted one."""
        if peer.address is None:
            self._channel.send(peer.key, codec.encode(Refuse(code=CUT_OFF, reason=text)))
        self._channel.hang_up(peer.key)
        if peer.address is not None and (wanted or peer.address in self._standing):
            now = self._clock()
            again = Peer(peer.key, Stage.DIALING, address=peer.address, heard_at=now, said_at=now)
            again.redial_at = now + (_REDIAL_SOON_S if wanted else _REDIAL_S)
            self.by_key[peer.key] = again

    def stranger(self, key: str) -> None:
        """Somebody speaks whom we don't know (any more): he must greet first."""
        reason = f"{self._identity.engine_id} waits for a greeting"
        self._channel.send(key, codec.encode(Refuse(code=CUT_OFF, reason=reason)))

    def drive(self) -> None:
        """See whether first accesses have gone through."""
        for peer in [peer for peer in self.by_key.values() if peer.stage is Stage.WARMING]:
            self.check_warm(peer)

    def waits(self, now: float) -> list[float]:
        """Seconds until something is due, for each peer that has something."""
        live = [self._beat_due(peer) - now for peer in self.by_key.values() if peer.stage in _BEATING]
        again = self._config.connect_timeout_s - now
        mute = [peer for peer in self.by_key.values() if peer.stage is Stage.GREETING]
        live += [peer.heard_at + again for peer in mute if peer.address in self._standing]
        return live + [peer.redial_at - now for peer in self.by_key.values() if peer.redial_at is not None]

    def tick(self, now: float, wanted: Callable[[Peer], bool]) -> None:
        """Heartbeats, silence, redials. `wanted`: whether a request waits for this peer."""
        for peer in list(self.by_key.values()):
            if peer.redial_at is not None and peer.redial_at <= now and peer.address is not None:
                barred = peer.stage is Stage.REFUSED
                if barred:
                    del self.by_key[peer.key]
                if not barred or peer.address in self._standing:
                    self.dial(*peer.address)
            unanswered = peer.stage in (Stage.DIALING, Stage.GREETING)
            limit, patience = self._config.connect_timeout_s, self._config.transfer_timeout_s
            if unanswered and now - peer.heard_at > limit and peer.address in self._standing:
                if peer.stage is Stage.GREETING:  # it listens: the greeting or its answer may have been lost
                    self.greet(peer.key)
            elif unanswered and now - peer.heard_at > limit and not wanted(peer):
                self._lose(peer.key, "peer_unreachable", f"no answer within {limit:g} s", False)
            elif peer.stage is Stage.WARMING and now - peer.met_at > patience:
                self._lose(peer.key, "peer_unreachable", f"no first access within {patience:g} s", False)
            if peer.stage not in (Stage.UP, Stage.WARMING, Stage.SILENT):
                continue
            quiet = now - peer.heard_at > self._config.lease_s
            if quiet and peer.stage is Stage.UP and peer.address is not None:
                peer.stage = Stage.SILENT
                self._silent(peer.key, f"{peer.name}: silent for {self._config.lease_s:g} s")
            elif quiet and peer.stage is not Stage.SILENT:
                self._lose(peer.key, "peer_gone", f"silent for {self._config.lease_s:g} s", False)
            elif self._beat_due(peer) <= now:
                self.send(peer.key, Beat())

    def _beat_due(self, peer: Peer) -> float:
        assert peer.greeting is not None
        return peer.said_at + max(_MIN_BEAT_S, min(peer.greeting.silence_s, self._config.lease_s) / 3)
