"""What P keeps of one request while somebody may want its KV, and of each registration for it. Data; `rendezvous.py`
decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol.instructions import PeerKey
from kvferry.protocol.legs import Leg
from kvferry.protocol.messages import Mode, Register
from kvferry.protocol.prompt import PromptMark
from kvferry.protocol.stream import Growth, Progress

LegKey = tuple[PeerKey, RegistrationId]


class SourceState(Enum):
    UNSEEN = auto()  # registrations came first
    COMPUTING = auto()  # the engine knows the request
    READY = auto()  # all KV computed; blocks known


@dataclass
class SourceLeg:
    peer: PeerKey
    register: Register
    progress: Progress
    reads: bool = True  # pull: D does; else we write
    state: Leg = Leg.HELD
    flying: int = 0  # WRITEs in flight
    stale: bool = False  # those in flight are of an attempt that is no more
    bad: bool = False  # one of them failed
    unsure: bool = False  # one of them is of a peer that was given up, and may still arrive there
    nbytes: int = 0
    descriptors: int = 0
    code: str = "cancelled"
    reason: str = ""
    peer_gone: bool = False


@dataclass
class Source:
    transfer_id: TransferId
    state: SourceState = SourceState.UNSEEN
    mode: Mode | None = None
    fan_out: int = 1
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0  # of the prompt
    prompt: PromptMark | None = None
    growth: Growth = field(default_factory=Growth)
    attempt: int = 0
    rewinding: bool = False  # `Rewound` is owed
    owed: bool = False  # `Release` is, whatever blocks were named
    watchers: list[tuple[PeerKey, int]] = field(default_factory=list)  # and the percentage they wait for
    legs: dict[LegKey, SourceLeg] = field(default_factory=dict)
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

    @property
    def held(self) -> bool:
        """The engine keeps the blocks until `Release`."""
        return self.owed or self.state is SourceState.READY or bool(self.block_ids)


@dataclass(frozen=True)
class Ending:
    ok: bool
    code: str
    reason: str
