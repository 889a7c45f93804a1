"""Who we are connected to: greeting, warm-up, heartbeats, death.

A decode rank dials a prefill rank and says `Hello`; the prefill rank checks that the two fit, adds the agent and says
`Welcome`; then each makes one small access to the other's scratch memory, so that the fabric's connections exist
before the first real transfer, and says `Warm`. Owned by the transfer core's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvferry.protocol.messages import Hello, Layout, Welcome
from kvferry.transfer.fabric import Handle, PeerName


class Stage(Enum):
    DIALING = auto()  # no connection yet
    GREETING = auto()  # Hello sent
    WARMING = auto()  # agents exchanged, first accesses under way
    UP = auto()
    REFUSED = auto()  # the other side will not talk to us; kept so that requests fail at once, with the reason


@dataclass
class Peer:
    """One rank on the other side. Times are the core's monotonic seconds."""

    key: str
    stage: Stage
    greeting: Hello | Welcome | None = None
    agent: PeerName = ""
    warm_handle: Handle | None = None
    warmed: bool = False
    told_warm: bool = False
    refusal: tuple[str, str] = ("", "")
    heard_at: float = 0.0
    said_at: float = 0.0
    address: tuple[str, int] | None = None  # of peers that we dialled
    redial_at: float | None = None  # DIALING: not before then

    @property
    def layout(self) -> Layout:
        assert self.greeting is not None
        return self.greeting.layout

    @property
    def name(self) -> str:
        """For messages to people."""
        where = f" at {self.address[0]}:{self.address[1]}" if self.address else ""
        who = f"{self.greeting.engine_id} rank {self.greeting.rank}" if self.greeting else "engine"
        return who + where

    def busy(self) -> bool:
        """The fabric must be driven for this peer's sake."""
        return self.stage is Stage.WARMING
