"""Mode pull: who moves the bytes between two ranks, D by READs or P by WRITEs, and how that is found out.

Where a fabric has one-sided READs (RDMA, a copy within the machine), the process that is read from takes no part.
Where it emulates them (TCP), that process sends the bytes itself, and UCX ends it if the reader dies meanwhile. So P
lets D read only if D's READ was seen to need no help. P says `Look` and leaves its agent alone; D reads P's scratch
memory, few enough bytes that emulating it does no harm, and says `Looked`. If P did touch its agent meanwhile, because
other transfers needed it, the look shows nothing and is asked for again. The first pull makes P ask; as long as nothing
was shown, P writes.
Owned by the transfer core's thread; times are its monotonic seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.config import ConnectorConfig
from kvferry.errors import FabricError
from kvferry.protocol.messages import Look, Looked, PullBy
from kvferry.transfer.areas import SCRATCH_BYTES
from kvferry.transfer.fabric import Fabric, Handle
from kvferry.transfer.peers import Lose, Peer, Peers

log = logging.getLogger("kvferry.transfer")

_LOOK_S = 0.02
"""One that needs no help is done in microseconds; the rest is for a busy machine."""
_AGAIN_S = 1.0
_MOST_LOOKS = 20
_MOST_LATE = 3
"""The first ones may wait for a connection that is still being set up."""


@dataclass
class _Way:
    """P's knowledge of one D rank.

    `by` 'auto': not known yet. `asked_for`: a pull has come. `touched`: calls of the fabric when the last look was
    asked for, None if none is open. `again_at`: when to ask for the next. `looks`, `late`: so many have ended, and so
    many of them only with our help. `helps_until`: D's look waits for us, and has so long.
    """

    by: PullBy
    asked_for: bool = False
    touched: int | None = None
    again_at: float = 0.0
    looks: int = 0
    late: int = 0
    helps_until: float = 0.0

    @property
    def may_ask(self) -> bool:
        return self.asked_for and self.by == "auto" and self.touched is None


@dataclass
class _Glance:
    """D's READ of a peer's scratch memory. `late`: that was said."""

    peer: Peer
    handle: Handle
    due: float
    late: bool = False


class Pulls:
    """`scratch`: address of ours. `lose(key, code, reason, keep)`: cuts a peer off."""

    def __init__(
        self,
        config: ConnectorConfig,
        name: str,
        fabric: Fabric,
        peers: Peers,
        scratch: int,
        clock: Callable[[], float],
        lose: Lose,
    ) -> None:
        self._config, self._name, self._fabric, self._peers = config, name, fabric, peers
        self._scratch, self._clock, self._lose = scratch, clock, lose
        self._ways: dict[str, _Way] = {}
        self._glances: dict[str, _Glance] = {}

    def busy(self) -> bool:
        """The fabric must be driven: for our look at a peer, or a peer's at us."""
        now = self._clock()
        return bool(self._glances) or any(way.helps_until > now for way in self._ways.values())

    def lost(self, key: str) -> None:
        self._ways.pop(key, None)
        glance = self._glances.pop(key, None)
        if glance is not None:
            self._fabric.release(glance.handle)

    # -- the prefill side -------------------------------------------------------------------------------------------

    def met(self, peer: Peer) -> None:
        """It can be used. D ranks only."""
        if peer.address is not None or peer.greeting is None:
            return
        mine, theirs = self._config.pull_by_now, peer.greeting.pull_by
        way = self._ways[peer.key] = _Way("auto")
        if "write" in (mine, theirs):
            self._found(peer, way, "write", "as configured")
        elif "read" in (mine, theirs):
            self._found(peer, way, "read", "as configured")
        elif self._config.num_threads:
            self._found(peer, way, "write", "with num_threads NIXL's threads may help a READ, which can't be seen")

    def reads(self, peer: Peer) -> bool:
        """It pulls: may it read from us?"""
        way = self._ways.get(peer.key)
        if way is None:
            return False
        way.asked_for = True
        return way.by == "read"

    def due(self) -> list[float]:
        """When looks are to be asked for."""
        return [way.again_at for way in self._ways.values() if way.may_ask]

    def tick(self, now: float, at_rest: bool) -> None:
        """With our agent `at_rest`, ask for the looks that are due."""
        for key, way in list(self._ways.items()) if at_rest else ():
            peer = self._peers.by_key.get(key)
            if way.may_ask and way.again_at <= now and peer is not None:
                way.touched = self._fabric.touched
                self._peers.send(key, Look())

    def looked(self, peer: Peer, message: Looked) -> None:
        way = self._ways.get(peer.key)
        if way is None or way.touched is None:
            return  # nobody asked
        if not message.over:
            way.helps_until = self._clock() + self._config.transfer_timeout_s
            return
        touched, way.touched, way.helps_until = way.touched, None, 0.0
        way.looks += 1
        way.late += not message.alone
        if way.late == _MOST_LATE:
            self._found(peer, way, "write", "its READs wait for our help")
        elif not message.alone:
            way.again_at = self._clock()
        elif touched == self._fabric.touched:
            self._found(peer, way, "read", "its READ needed no help of ours")
        elif way.looks >= _MOST_LOOKS:
            self._found(peer, way, "write", "whether its READs need our help could not be seen")
        else:
            way.again_at = self._clock() + _AGAIN_S

    def _found(self, peer: Peer, way: _Way, by: PullBy, why: str) -> None:
        way.by = by
        who = "decode reads" if by == "read" else "prefill writes"
        log.info("%s: pull by %s: %s, %s", self._name, peer.name, who, why)

    # -- the decode side --------------------------------------------------------------------------------------------

    def look(self, peer: Peer) -> None:
        """P wants to see whether our READs need its help."""
        if peer.key in self._glances or peer.greeting is None:
            return
        mine, theirs, size = (
            np.array([x], dtype=np.uint64) for x in (self._scratch, peer.greeting.scratch, SCRATCH_BYTES)
        )
        try:
            handle = self._fabric.post("READ", peer.agent, mine, theirs, size, peer.layout.device)
        except FabricError as error:
            return self._lose(peer.key, "peer_gone", str(error), False)
        self._glances[peer.key] = _Glance(peer, handle, self._clock() + _LOOK_S)
        return self.drive()

    def drive(self) -> None:
        for glance in list(self._glances.values()):
            self._follow(glance)

    def _follow(self, glance: _Glance) -> None:
        key = glance.peer.key
        try:
            done = self._fabric.check(glance.handle)
        except FabricError as error:
            return self._lose(key, "peer_gone", f"a look at {glance.peer.name} failed: {error}", False)
        if done:
            self.lost(key)
            self._peers.send(key, Looked(alone=not glance.late, over=True))
        elif not glance.late and self._clock() >= glance.due:
            glance.late = True
            self._peers.send(key, Looked(alone=False, over=False))
        return None
