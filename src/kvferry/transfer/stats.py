"""What the transfers of one rank did since the engine last asked, and what they hold now.

Threads: the core's owner thread fills a `Recorder`, the engine thread empties it once per step; a lock that neither
keeps for longer than an append lies between. A `TransferStats` is plain data: it can be pickled, and turned to and from
dicts and lists by msgspec. What ranks say is joined with `TransferStats.add`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from kvferry.transfer import commands as cmd

Side = Literal["prefill", "decode"]


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds at one moment.

    `sources`: transfers open on the prefill side; `landings`: on the decode side. `posts`: WRITEs and READs in flight
    from here. `backlog_bytes`: streamed KV that is computed and registered for, but not posted. `quarantined_blocks`:
    blocks of requests that have failed or were aborted, kept until nothing can touch them any more.
    """

    sources: int = 0
    landings: int = 0
    posts: int = 0
    backlog_bytes: int = 0
    quarantined_blocks: int = 0


class TransferStats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry in `plan_s`, `post_s`, `wire_s` (seconds; `wire_s` from the begin of the post to completion), `nbytes`
    and `descriptors` per completed post. `failed_posts`: those that ended badly, or with their peer. `verify_s`: one
    entry per registration that was digested, seconds. `ended`: side -> outcome ('ok' or an error's code) -> transfers
    of this rank. One entry in `blocks` and `runs` per landing that takes KV: its blocks, and how many stretches of
    neighbours they make. `levels`: by rank, absent where unchanged. `turned_away`: reason -> connections and messages
    that the side channel did not take (`transfer/door.py`). `pulls`: 'read' or 'write' -> registrations of mode pull
    that P served, by who moved the bytes.
    """

    plan_s: list[float] = msgspec.field(default_factory=list)
    post_s: list[float] = msgspec.field(default_factory=list)
    wire_s: list[float] = msgspec.field(default_factory=list)
    nbytes: list[int] = msgspec.field(default_factory=list)
    descriptors: list[int] = msgspec.field(default_factory=list)
    failed_posts: int = 0
    verify_s: list[float] = msgspec.field(default_factory=list)
    ended: dict[Side, dict[str, int]] = msgspec.field(default_factory=dict)
    blocks: list[int] = msgspec.field(default_factory=list)
    runs: list[int] = msgspec.field(default_factory=list)
    levels: dict[str, Levels] = msgspec.field(default_factory=dict)
    turned_away: dict[str, int] = msgspec.field(default_factory=dict)
    pulls: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def eventless(self) -> bool:
        """Nothing happened; levels may have changed."""
        events = (self.nbytes, self.failed_posts, self.ended, self.blocks, self.turned_away, self.verify_s, self.pulls)
        return not any(events)

    def count(self, side: Side, outcome: str, number: int = 1) -> None:
        outcomes = self.ended.setdefault(side, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + number

    def add(self, later: TransferStats) -> None:
        """Join what another rank says, or the same one later."""
        self.plan_s += later.plan_s
        self.post_s += later.post_s
        self.wire_s += later.wire_s
        self.nbytes += later.nbytes
        self.descriptors += later.descriptors
        self.failed_posts += later.failed_posts
        self.verify_s += later.verify_s
        for side, outcomes in later.ended.items():
            for outcome, number in outcomes.items():
                self.count(side, outcome, number)
        self.blocks += later.blocks
        self.runs += later.runs
        self.levels.update(later.levels)
        for reason, number in later.turned_away.items():
            self.turned_away[reason] = self.turned_away.get(reason, 0) + number
        for by, number in later.pulls.items():
            self.pulls[by] = self.pulls.get(by, 0) + number


def block_runs(block_ids: Sequence[int]) -> int:
    """How many stretches of neighbours, ids going up or down by one: 1 is a whole region, `len(block_ids)` scattered.
    A block pool hands out downward stretches too, and they can be copied as one where the other side has one as well.
    """
    return sum(abs(block - before) != 1 for before, block in pairwise(block_ids)) + bool(block_ids)


class Recorder:
    """`rank`: tensor-parallel. Blocks of landings are counted by rank 0 alone, since all ranks have the same."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._open = TransferStats()
        self._news = False
        self._levels = Levels()
        self._doomed: set[str] = set()  # requests whose failure is counted, and whose `Received` is to come

    # -- the owner thread -------------------------------------------------------------------------------------------

    def moved(self, *, plan_s: float, post_s: float, wire_s: float, nbytes: int, descriptors: int) -> None:
        """One post is complete."""
        with self._lock:
            new, self._news = self._open, True
            new.plan_s.append(plan_s)
            new.post_s.append(post_s)
            new.wire_s.append(wire_s)
            new.nbytes.append(nbytes)
            new.descriptors.append(descriptors)

    def failed(self, posts: int) -> None:
        """So many were in flight, and have no good end."""
        if posts:
            with self._lock:
                self._open.failed_posts += posts
                self._news = True

    def verified(self, seconds: float) -> None:
        """The KV of one registration was digested."""
        with self._lock:
            self._open.verify_s.append(seconds)
            self._news = True

    def allocated(self, land: cmd.Land, block_size: int) -> dict[str, int]:
        """What a landing takes, as facts for its story: tokens, the blocks they need, and the runs those make."""
        tokens = land.end_token - land.start_token
        needed = land.block_ids[: -(-land.end_token // block_size) - land.start_token // block_size] if tokens else ()
        runs = block_runs(needed)
        if needed and self._rank == 0:
            with self._lock:
                self._open.blocks.append(len(needed))
                self._open.runs.append(runs)
                self._news = True
        return {"tokens": tokens, "blocks": len(needed), "runs": runs}

    def doomed(self, request: str, code: str) -> None:
        """A transfer to this rank has failed; that its blocks are free comes later, as `ended`."""
        self._doomed.add(request)
        self.count("decode", code)

    def ended(self, result: cmd.Sent | cmd.Received, *, counts: bool = True) -> None:
        """`counts` False: a request ended that was not the transfer's."""
        if isinstance(result, cmd.Received) and result.request in self._doomed:
            self._doomed.discard(result.request)
        elif counts:
            self.count("prefill" if isinstance(result, cmd.Sent) else "decode", result.code or "ok")

    def doomed_requests(self) -> frozenset[str]:
        """Whose failure was told, and whose end is to come."""
        return frozenset(self._doomed)

    def count(self, side: Side, outcome: str) -> None:
        with self._lock:
            self._open.count(side, outcome)
            self._news = True

    def turned_away(self, reason: str) -> None:
        """Something that came in on the side channel was not taken."""
        with self._lock:
            counts = self._open.turned_away
            counts[reason] = counts.get(reason, 0) + 1
            self._news = True

    def pulled(self, by: Literal["read", "write"]) -> None:
        """A registration of mode pull is being served."""
        with self._lock:
            self._open.pulls[by] = self._open.pulls.get(by, 0) + 1
            self._news = True

    def level(self, levels: Levels) -> None:
        """What is held now."""
        if levels != self._levels:
            self._levels = levels
            with self._lock:
                self._open.levels[str(self._rank)] = levels
                self._news = True

    # -- the engine thread ------------------------------------------------------------------------------------------

    def take(self) -> TransferStats | None:
        """What is new since the last call."""
        if not self._news:
            return None
        with self._lock:
            out, self._open, self._news = self._open, TransferStats(), False
        return out
