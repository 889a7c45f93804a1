"""The life of one registration on a P rank, as a table. Pure; `rendezvous.py` decides which event happens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvferry.protocol.table import Table


class Leg(Enum):
    HELD = auto()  # waits for the source
    STREAMING = auto()  # stream: prefill runs, chunks are written as they come
    WRITING = auto()  # all KV is computed; WRITEs are posted or about to be
    GRANTED = auto()  # pull by READ: D may read
    REVOKED = auto()  # pull by READ: D was told that it failed, but may read still
    FENCING = auto()  # ended, but its WRITEs have not: the outcome waits for them
    ENDED = auto()


@dataclass(frozen=True)
class StartPush:
    """The source is ready and this leg's WRITEs may go: push, or pull where D can't read without our help."""


@dataclass(frozen=True)
class StartStream:
    """The first chunk may go."""


@dataclass(frozen=True)
class Sealed:
    """Stream: all KV is computed."""


@dataclass(frozen=True)
class Faltered:
    """A WRITE failed while others of the leg are in flight."""


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
    """Every WRITE of the leg completed, and there is none to come."""


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
    (Leg.HELD, StartStream): (Leg.STREAMING, "stream"),
    (Leg.HELD, StartPull): (Leg.GRANTED, "grant"),
    (Leg.HELD, Nothing): (Leg.ENDED, "landed"),
    (Leg.HELD, Cancelled): (Leg.ENDED, "failed"),
    (Leg.HELD, SourceLost): (Leg.ENDED, "failed"),
    (Leg.HELD, PeerGone): (Leg.ENDED, ""),
    (Leg.STREAMING, Sealed): (Leg.WRITING, "seal"),
    (Leg.STREAMING, Faltered): (Leg.FENCING, ""),
    (Leg.STREAMING, WriteFailed): (Leg.ENDED, "failed"),
    (Leg.STREAMING, Cancelled): (Leg.FENCING, ""),
    (Leg.STREAMING, SourceLost): (Leg.FENCING, ""),
    (Leg.STREAMING, PeerGone): (Leg.FENCING, ""),
    (Leg.WRITING, WriteDone): (Leg.ENDED, "landed"),
    (Leg.WRITING, Faltered): (Leg.FENCING, ""),
    (Leg.WRITING, WriteFailed): (Leg.ENDED, "failed"),
    (Leg.WRITING, Cancelled): (Leg.FENCING, ""),
    (Leg.WRITING, SourceLost): (Leg.FENCING, ""),
    (Leg.WRITING, PeerGone): (Leg.FENCING, ""),
    (Leg.FENCING, WriteDone): (Leg.ENDED, "failed"),
    (Leg.FENCING, WriteFailed): (Leg.ENDED, "failed"),
    (Leg.FENCING, Faltered): (Leg.FENCING, ""),
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
