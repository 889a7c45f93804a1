"""What P's machine asks of whoever drives it (D's machine shares `Send` and `Note`). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.ids import TransferId
from kvferry.protocol.messages import Message, Register
from kvferry.protocol.stream import Span

PeerKey = str


@dataclass(frozen=True)
class Send:
    peer: PeerKey
    message: Message


@dataclass(frozen=True)
class StartWrite:
    """Plan and post `span` of the source into the leg's blocks. Answered by one `wrote` or `write_failed`."""

    peer: PeerKey
    register: Register
    block_ids: tuple[int, ...]  # the source's blocks from logical block 0 on
    span: Span


@dataclass(frozen=True)
class Rewound:
    """Answer to `rewind`: nothing reads the source's blocks any more."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Tell:
    """To whoever asked, which need be no decode rank."""

    asker: PeerKey
    message: Message


@dataclass(frozen=True)
class Release:
    """The engine may free the request's blocks. Exactly one per source that reached READY, or ended while streaming."""

    transfer_id: TransferId
    ok: bool
    code: str
    reason: str


@dataclass(frozen=True)
class Note:
    """One line for the story."""

    transfer_id: TransferId
    event: str
    reason: str = ""
