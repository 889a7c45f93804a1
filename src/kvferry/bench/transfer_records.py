"""What the two sides of `kvferry bench transfer` are told, and what they tell. All of it can be pickled.

Times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.bench.transfer_shape import Order, Shape
from kvferry.config import Staging
from kvferry.protocol.messages import Layout, Verify
from kvferry.transfer.fabric import Op

LIMIT_S = 120.0
"""Of any one wait, beyond the time that prefill takes."""


@dataclass(frozen=True)
class Setup:
    """What a side is made of. `role`: 'producer' or 'consumer'. `peers`: side channels to connect to at the start."""

    role: str
    shape: Shape
    layout: Order
    num_blocks: int
    staging: Staging
    verify: Verify
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """How a side is reached."""

    port: int
    agent: bytes
    layout: Layout


@dataclass(frozen=True)
class Posted:
    """One post of the core, by its own account. `began`: when the post began; `ended`: when it was found complete."""

    descriptors: int
    nbytes: int
    plan_s: float
    post_s: float
    began: float
    ended: float


@dataclass(frozen=True)
class Handled:
    """One transfer, as the engine's thread of one side saw it.

    `thread_s`: how long our hooks held that thread: `submit` of each command and `results`, without the sleep between
    them. P: `first`, `ready`: just before the first `Grown` or the `Ready`, and before the `Ready`, were handed over;
    `late_s`: how much later than planned the `Ready` was. `end`: when the result had been taken. `verify_s`: what the
    digests took on the transfer thread.
    """

    ok: bool
    code: str
    reason: str
    thread_s: float
    end: float
    first: float = 0.0
    ready: float = 0.0
    late_s: float = 0.0
    verify_s: float = 0.0
    posts: list[Posted] = field(default_factory=list)


@dataclass(frozen=True)
class Raw:
    """Copies posted and polled on the calling thread. `total_s`: from before planning until all have completed."""

    op: Op
    descriptors: int
    nbytes: int
    plan_s: float
    post_s: float
    total_s: float
