"""`kvferry bench transfer`: one transfer by the connector's core, again and again, beside what it is held against.

In each round, one after the other: *ours*; *push* (only if ours streams), the same KV handed over whole; the *floor*,
the same bytes as one WRITE in one piece; *naive*, one descriptor per block, head and layer, planned and posted on the
calling thread. All four go between the same two processes and memories, by agents with the same settings. The first
round of each is a warm-up: it is in no figure, and D's bytes must be P's after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.bench.records import VoidRun
from kvferry.bench.transfer_pair import Pair
from kvferry.bench.transfer_records import Handled, Posted, Raw
from kvferry.bench.transfer_shape import Order, Shape, table
from kvferry.config import Staging
from kvferry.ids import EngineId, TransferId, new_transfer_id
from kvferry.launch.ports import LOOPBACK
from kvferry.protocol.messages import Mode, Verify
from kvferry.transfer import commands as cmd
from kvferry.transfer.fabric import Op

PREFILL_OF_PUSH = 1.5
"""How long prefill takes where nothing else is said, in whole push transfers."""

Steps = list[tuple[float, cmd.Grown | cmd.Ready]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """`prefill_ms`: None for `PREFILL_OF_PUSH` times what a push takes in the warm-up. Only stream has chunks."""

    shape: Shape
    layout: Order
    tokens: int
    fragmentation: float
    mode: Mode
    chunks: int
    layer_groups: int
    staging: Staging
    prefill_ms: float | None
    verify: Verify
    runs: int
    seed: int

    @property
    def blocks(self) -> int:
        return self.shape.blocks(self.tokens)

    @property
    def nbytes(self) -> int:
        """Whole blocks move."""
        return self.blocks * self.shape.block_bytes


@dataclass(frozen=True)
class Tables:
    """Where a request's blocks are, logical block 0 first."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True)
class Ours:
    """One transfer by the core.

    `plan_ms`, `post_ms`: on the transfer thread, all WRITEs or READs together. `wire_ms`: how long copies were in
    flight, from the beginning of a post until it was found complete; where several were, counted once. `landed_ms`:
    from before the KV (stream: its first part) was handed over until D's engine thread had its `Received`.
    `exposed_ms`: the same from the end of prefill on, before the `Ready` was handed over. `prefill_thread_ms`,
    `decode_thread_ms`: how long our hooks held P's and D's engine thread: handing commands over and taking results.
    `prefill_verify_ms`, `decode_verify_ms`: digests, on P's and on D's transfer thread. `late_ms`: how much later than
    planned prefill ended.
    """

    descriptors: int
    posts: int
    plan_ms: float
    post_ms: float
    wire_ms: float
    landed_ms: float
    exposed_ms: float
    prefill_thread_ms: float
    decode_thread_ms: float
    prefill_verify_ms: float
    decode_verify_ms: float
    late_ms: float

    @property
    def engine_thread_ms(self) -> float:
        """Of the side where it is longer."""
        return max(self.prefill_thread_ms, self.decode_thread_ms)


def steps_of(job: Job, mode: Mode, who: TransferId, ids: tuple[int, ...], prefill_s: float) -> Steps:
    """What P's engine hands over, and how many seconds after the start of prefill.

    Stream: `chunks` of about as many blocks each, ready at equal distances; the layers of each in `layer_groups`, at
    equal distances within its time. Push and pull: everything at once, at 0, since nothing happens before.
    """
    ready = cmd.Ready(who, who, ids, job.tokens)
    if mode != "stream":
        return [(0.0, ready)]
    edges = [job.blocks * index // job.chunks for index in range(job.chunks + 1)]
    ends = [min(edge * job.shape.block_size, job.tokens) for edge in edges]
    chunk_s, groups = prefill_s / job.chunks, job.layer_groups
    steps: Steps = []
    for index, (first, last, end) in enumerate(zip(edges, edges[1:], ends[1:], strict=False)):
        for group in range(1, groups + 1):
            new = ids[first:last] if group == 1 else ()
            planes = job.shape.layers * group // groups if group < groups else None
            steps.append((chunk_s * (index + group / groups), cmd.Grown(who, who, new, end, planes)))
    return [*steps[:-1], (steps[-1][0], ready)]


def in_flight_s(posts: Sequence[Posted]) -> float:
    """How long at least one of them was."""
    total, until = 0.0, 0.0
    for post in sorted(posts, key=lambda one: one.began):
        total += max(0.0, post.ended - max(post.began, until))
        until = max(until, post.ended)
    return total


class Bench:
    """Rounds of one job between one pair."""

    def __init__(self, job: Job, pair: Pair) -> None:
        self._job, self._pair = job, pair
        self._random = np.random.default_rng(job.seed)
        self.prefill_s = (job.prefill_ms or 0.0) / 1e3

    def tables(self) -> Tables:
        """New ones, each side's by itself."""
        made = (table(self._random, self._job.blocks, self._job.fragmentation) for _ in range(2))
        return Tables(*(tuple(ids.tolist()) for ids in made))

    def ours(self, mode: Mode, tables: Tables) -> Ours:
        """Raises `VoidRun` if the transfer failed or moved other than the whole KV."""
        job, pair, who = self._job, self._pair, new_transfer_id()
        steps = steps_of(job, mode, who, tables.prefill, self.prefill_s)
        where = (LOOPBACK, pair.port, EngineId(""), 0)
        pair.prefill.ask("expect", cmd.Expect(who, who, mode, 1, job.tokens))
        pair.decode.call("land", cmd.Land(who, who, mode, *where, 0, job.tokens, tables.decode))
        pair.prefill.ask("registered", who)
        pair.prefill.call("prefill", steps)
        sent: Handled = pair.prefill.answer()
        received: Handled = pair.decode.answer()
        for side, handled in (("prefill", sent), ("decode", received)):
            if not handled.ok:
                raise VoidRun(f"{mode}: the transfer failed on the {side} side: {handled.code}: {handled.reason}")
        posts = sent.posts or received.posts
        moved = sum(post.nbytes for post in posts)
        if moved != job.nbytes:
            raise VoidRun(f"{mode}: {moved} bytes were moved, {job.nbytes} expected")
        return Ours(
            descriptors=sum(post.descriptors for post in posts),
            posts=len(posts),
            plan_ms=sum(post.plan_s for post in posts) * 1e3,
            post_ms=sum(post.post_s for post in posts) * 1e3,
            wire_ms=in_flight_s(posts) * 1e3,
            landed_ms=(received.end - sent.first) * 1e3,
            exposed_ms=(received.end - sent.ready) * 1e3,
            prefill_thread_ms=sent.thread_s * 1e3,
            decode_thread_ms=received.thread_s * 1e3,
            prefill_verify_ms=sent.verify_s * 1e3,
            decode_verify_ms=received.verify_s * 1e3,
            late_ms=sent.late_s * 1e3,
        )

    @property
    def naive_op(self) -> Op:
        """Who pulls without us reads on its engine thread."""
        return "READ" if self._job.mode == "pull" else "WRITE"

    def naive(self, tables: Tables) -> Raw:
        return self._pair.naive(self.naive_op, tables.prefill, tables.decode, self._job.tokens)

    def floor(self) -> Raw:
        return self._pair.floor(self._job.nbytes)

    # -- D's bytes are P's ------------------------------------------------------------------------------------------

    def check_blocks(self, what: str, tables: Tables) -> None:
        """Raises `VoidRun` naming the first block that differs."""
        prefill, decode = self._pair.prefill, self._pair.decode
        prefill.call("digests", tables.prefill)
        theirs = decode.ask("digests", tables.decode)
        for index, (p, d) in enumerate(zip(prefill.answer(), theirs, strict=True)):
            if p != d:
                where = f"logical block {index} ({tables.prefill[index]} on P, {tables.decode[index]} on D)"
                raise VoidRun(f"{what}: {where} is not on D what it is on P")

    def check_floor(self) -> None:
        nbytes = self._job.nbytes
        if self._pair.prefill.ask("digest_of_first", nbytes) != self._pair.decode.ask("digest_of_first", nbytes):
            raise VoidRun(f"floor: the first {nbytes} bytes are not on D what they are on P")

    def warm_up(self) -> None:
        """Each kind once, into memory of zeros, and looked at."""
        pair, job = self._pair, self._job
        pair.prefill.ask("fill", job.seed)
        tables = self.tables()
        for mode in _modes(job):
            pair.decode.ask("wipe")
            self.ours(mode, tables)
            self.check_blocks(mode, tables)
            if mode == "push" and job.prefill_ms is None:  # again: the first one's time is no measure
                self.prefill_s = PREFILL_OF_PUSH * self.ours(mode, tables).landed_ms / 1e3
        pair.decode.ask("wipe")
        self.floor()
        self.check_floor()
        pair.decode.ask("wipe")
        self.naive(tables)
        self.check_blocks("naive", tables)


def _modes(job: Job) -> list[Mode]:
    """Push first: how long it takes says how long prefill shall."""
    return ["push", "stream"] if job.mode == "stream" else [job.mode]


@dataclass(frozen=True)
class Samples:
    """All but the warm-up, in order. `push` is empty, `prefill_ms` (how long prefill took) None unless ours streams."""

    ours: list[Ours]
    push: list[Ours]
    floor: list[Raw]
    naive: list[Raw]
    prefill_ms: float | None


def measure(job: Job, say: Say) -> Samples:
    """Starts both sides and ends them. Raises `KVFerryError`: `VoidRun` if bytes are wrong."""
    with Pair(job.shape, job.layout, job.blocks, job.staging, job.verify) as pair:
        bench = Bench(job, pair)
        bench.warm_up()
        samples = Samples([], [], [], [], bench.prefill_s * 1e3 if job.mode == "stream" else None)
        for index in range(job.runs):
            tables = bench.tables()
            samples.ours.append(bench.ours(job.mode, tables))
            if job.mode == "stream":
                samples.push.append(bench.ours("push", tables))
            samples.floor.append(bench.floor())
            samples.naive.append(bench.naive(tables))
            say(f"round {index + 1} of {job.runs}: landed in {samples.ours[-1].landed_ms:.1f} ms")
    return samples
