"""Blocks that can't go back because a peer that isn't heard of may still write to them: how many are too many.

The one fence that needs nobody's word is an agent of our own that is no more: its sockets are closed and its memory
keys are void, so nothing that was posted to it can arrive. Core's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.protocol.landing import Instruction, Landings
from kvferry.transfer.fabric import Fabric
from kvferry.transfer.peers import Peers
from kvferry.transfer.posts import Posts
from kvferry.transfer.scatter import Scatterer

log = logging.getLogger("kvferry.transfer")
CODE = "quarantine_full"


class Quarantine:
    """`most`: blocks. `patience_s`: for how long there may be more. `holders`: of the agent's handles."""

    def __init__(
        self,
        most: int,
        patience_s: float,
        peers: Peers,
        landings: Landings,
        holders: tuple[Posts, Scatterer],
        fabric: Fabric,
    ) -> None:
        self._most, self._patience_s = most, patience_s
        self._peers, self._landings, self._holders, self._fabric = peers, landings, holders, fabric
        self._since: float | None = None

    def relieve(self, now: float, lose: Callable[[str, str, str, bool], None]) -> list[Instruction]:
        """If there are too many for too long: a new agent, and everybody is greeted anew. What ends with that.

        Transfers that other peers have under way with us fail too. Raises `FabricError`.
        """
        held = self._landings.held_by_others(self._peers.up_keys())
        if held <= self._most:
            self._since = None
            return []
        if self._since is None:
            self._since = now
        if now - self._since <= self._patience_s:
            return []
        self._since = None
        reason = f"{held} blocks wait for peers that are not heard of, at most {self._most} may: a new agent is made"
        log.error("%s", reason)
        for key in list(self._peers.by_key):
            lose(key, CODE, reason, False)
        for holder in self._holders:
            holder.close()
        self._fabric.renew()
        self._peers.renewed()
        return self._landings.fenced(now)
