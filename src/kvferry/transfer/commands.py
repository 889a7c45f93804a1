"""What the engine thread hands to the transfer thread, and what comes back. All immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.ids import TransferId
from kvferry.protocol.messages import Mode
from kvferry.protocol.prompt import PromptMark


class Moment(Protocol):
    """A point in a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has got there."""


@dataclass(frozen=True)
class Expect:
    """P: the engine took in a request whose KV will be wanted."""

    transfer_id: TransferId
    request: str
    mode: Mode
    fan_out: int
    num_tokens: int = 0
    prompt: PromptMark | None = None


@dataclass(frozen=True)
class Grown:
    """P, stream: KV up to `tokens` is there once `moment` has passed, in the blocks named before and in `block_ids`;
    with `planes`, only the first ones of what is new. It stays until `Sent` or `Rewound`."""

    transfer_id: TransferId
    request: str
    block_ids: tuple[int, ...]
    tokens: int
    planes: int | None = None
    moment: Moment | None = None


@dataclass(frozen=True)
class Rewind:
    """P, stream: the blocks are wanted back and the prompt will be computed anew; `Rewound` answers."""

    transfer_id: TransferId
    request: str


@dataclass(frozen=True)
class Ready:
    """P: KV of tokens [0, num_tokens) is in `block_ids` once `moment` has passed; it stays until `Sent`."""

    transfer_id: TransferId
    request: str
    block_ids: tuple[int, ...]
    num_tokens: int
    moment: Moment | None = None


@dataclass(frozen=True)
class Abort:
    """P: the request ended without its KV. `held`: its blocks stay until `Sent`, since some of it was streamed."""

    transfer_id: TransferId
    request: str
    reason: str
    held: bool = False


@dataclass(frozen=True)
class Land:
    """D: blocks are allocated for tokens [start_token, end_token); equal means 'nothing needed, tell P'.

    `host`, `port`: side channel of P's rank 0. `engine_id` '' and `tp_size` 0: the request didn't say. `prompt`: digest
    of the first `end_token` token ids, '' if they are not known.
    """

    transfer_id: TransferId
    request: str
    mode: Mode
    host: str
    port: int
    engine_id: str
    tp_size: int
    start_token: int
    end_token: int
    block_ids: tuple[int, ...]
    prompt: str = ""


@dataclass(frozen=True)
class Wait:
    """D: a request for this transfer queues for blocks; `Land` follows."""

    transfer_id: TransferId
    host: str
    port: int


@dataclass(frozen=True)
class Drop:
    """D: the request was aborted."""

    request: str


Command = Expect | Grown | Rewind | Ready | Abort | Land | Wait | Drop


@dataclass(frozen=True)
class Sent:
    """P: the blocks may be freed."""

    request: str
    transfer_id: TransferId
    ok: bool
    code: str
    reason: str


@dataclass(frozen=True)
class Received:
    """D: the KV is there (ok), or will never come; either way nothing can write to the blocks any more."""

    request: str
    transfer_id: TransferId
    ok: bool
    code: str
    reason: str


@dataclass(frozen=True)
class Failing:
    """D: the KV will never come, so the request may fail; its blocks stay until `Received`."""

    request: str
    transfer_id: TransferId
    code: str
    reason: str


@dataclass(frozen=True)
class Rewound:
    """P: nothing reads the blocks any more."""

    request: str
    transfer_id: TransferId


Result = Sent | Rewound | Failing | Received
