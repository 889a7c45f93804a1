"""What the machine of `pair_machine.py` is made of: links, copies under way, and what a transfer is to be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.ids import TransferId
from kvferry.protocol import messages as wire
from kvferry.protocol.stream import Pace, Span

PS, DS, TRANSFERS = 2, 2, 6
DOWN = "down"
JUNK = ("junk",)


@dataclass
class Link:
    d: int
    p: int
    key: str
    to_p: deque = field(default_factory=deque)
    to_d: deque = field(default_factory=deque)
    sent_p: list = field(default_factory=list)
    sent_d: list = field(default_factory=list)
    cut: bool = False
    leaving: bool = False  # P has begun to take leave of it
    gone_p: bool = False
    gone_d: bool = False
    welcomed: bool = False  # else P holds the greeting


@dataclass
class Copying:
    p: int
    d: int
    key: str
    register: wire.Register
    source: tuple[int, ...]
    span: Span
    done: int = 0
    orphan: bool = False  # its peer was given up


@dataclass
class Plan:
    """What one transfer is going to be."""

    tid: TransferId
    mode: str
    ps: tuple[int, ...]
    ds: tuple[int, ...]
    fan_out: int
    legs: int
    pace: Pace
