"""Copies in flight: planned, posted and polled. Owned by the transfer core's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.config import ConnectorConfig
from kvferry.errors import FabricError
from kvferry.protocol import messages as wire
from kvferry.protocol.cost import CostMeter
from kvferry.protocol.layout import HeadShare, fan_in
from kvferry.protocol.plan import plan, total_bytes
from kvferry.protocol.stream import Pace, Span
from kvferry.story import Story
from kvferry.transfer.fabric import Fabric, Handle, Op, PeerName
from kvferry.transfer.peers import Identity, Peer
from kvferry.transfer.stats import Recorder


@dataclass
class Post:
    """Copies for one registration, all or a part of it. `posted_at`: when the post began, `began_at`: its
    plan, in the core's monotonic seconds. `post_s`: how long the call took."""

    op: Op
    peer: str
    agent: PeerName
    register: wire.Register
    handle: Handle | None  # None: could not be posted
    nbytes: int
    descriptors: int
    posted_at: float
    began_at: float
    post_s: float = 0.0


LOST = "lost"
"""`Posts.poll`'s code for a post that has ended, one way or the other, after its peer was given up."""


class Posts:
    """`limit_s`: a post that takes longer counts as broken.

    A posted copy can't be called back: the fabric goes on with it whatever becomes of the side channel, even if its
    handle is released. So those of a peer that was given up are kept, and polled, until the fabric says how they ended.
    """

    def __init__(
        self,
        identity: Identity,
        layout: wire.Layout,
        fabric: Fabric,
        story: Story,
        clock: Callable[[], float],
        limit_s: float,
        stats: Recorder,
    ) -> None:
        self._identity, self._layout, self._fabric = identity, layout, fabric
        self._story, self._clock, self._limit_s, self._stats = story, clock, limit_s, stats
        self._open: list[Post] = []
        self._lost: list[Post] = []
        self.meter = CostMeter()

    def __len__(self) -> int:
        return len(self._open) + len(self._lost)

    def only_lost(self) -> bool:
        """What is in flight is of use to nobody."""
        return not self._open

    def reach(self, agent: PeerName) -> bool:
        """Copies from or to that agent are in flight, though its peer was given up."""
        return any(post.agent == agent for post in self._lost)

    def open(self) -> tuple[Post, ...]:
        return tuple(self._open)

    def share_with(self, op: Op, peer: Peer) -> HeadShare | None:
        """Which heads go between that peer and us; None: we have nothing to do with each other."""
        assert peer.greeting is not None
        me, other, writing = self._identity, peer.greeting, op == "WRITE"
        p_rank, d_rank = (me.rank, other.rank) if writing else (other.rank, me.rank)
        p_tp, d_tp = (me.tp_size, other.tp_size) if writing else (other.tp_size, me.tp_size)
        shares = fan_in(d_rank, d_tp, p_tp, self._layout.total_heads)
        return next((share for share in shares if share.p_rank == p_rank), None)

    def written_for(self, peer: Peer, register: wire.Register) -> int | None:
        """Bytes that this P rank writes to us for a registration; None: none, since we read, or have nothing of it."""
        share = self.share_with("READ", peer)
        if register.mode == "pull" or share is None:
            return None
        return total_bytes(peer.layout, self._layout, share, register.start_token, register.end_token)

    def pace(self, peer: Peer, config: ConnectorConfig) -> Pace:
        """How a registration of that peer's is streamed."""
        unit = max(self._layout.block_size, peer.layout.block_size)
        share = self.share_with("WRITE", peer)
        token_bytes = total_bytes(self._layout, peer.layout, share, 0, unit) / unit if share is not None else 0
        if not token_bytes:
            return Pace(unit)
        worth = config.stream_chunk_bytes or self.meter.cost.least_bytes(self.meter.bytes_per_descriptor)
        least = int(worth / token_bytes)
        most = max(unit, int(config.stream_write_bytes / token_bytes) // unit * unit)
        return Pace(unit, least, most, token_bytes)

    def start(self, op: Op, peer: Peer, register: wire.Register, source_block_ids: tuple[int, ...], span: Span) -> bool:
        """Plan and post `span`; False if there is nothing to copy. `source_block_ids`: logical block 0 first.

        Raises `PlanError` (nothing was posted) or `FabricError` (some of it may be under way: cut the peer).
        """
        started = self._clock()
        writing = op == "WRITE"
        src, dst = (self._layout, peer.layout) if writing else (peer.layout, self._layout)
        share = self.share_with(op, peer)
        if share is None:
            return False
        source = source_block_ids[span.start_token // src.block_size :]
        target = register.block_ids[span.start_token // dst.block_size - register.start_token // dst.block_size :]
        made = plan(src, dst, share, source, target, span.start_token, span.end_token, span.first_plane, span.end_plane)
        if not made.descriptors:
            return False
        planned = self._clock()
        post = Post(op, peer.key, peer.agent, register, None, made.total_bytes, made.descriptors, planned, started)
        self._open.append(post)
        local, remote = (made.src, made.dst) if writing else (made.dst, made.src)
        post.handle = self._fabric.post(op, peer.agent, local, remote, made.nbytes, peer.layout.device)
        post.post_s = self._clock() - planned
        self._story.note(
            register.transfer_id,
            "posted",
            op=op,
            descriptors=made.descriptors,
            nbytes=made.total_bytes,
            plan_ms=round((planned - started) * 1e3, 3),
            post_ms=round(post.post_s * 1e3, 3),
        )
        return True

    def poll(self) -> Iterator[tuple[Post, str, str]]:
        """(post, code, reason) of each that ended: code '' if well. The caller cuts the peer of one that did not: some
        of its copies may be under way still, and the connection is broken for all."""
        for post in list(self._lost):
            if self._is_over(post):
                self._lost.remove(post)
                self._fabric.release(post.handle)
                yield post, LOST, ""
        for post in list(self._open):
            if post not in self._open:
                continue  # went with its peer
            try:
                done = post.handle is not None and self._fabric.check(post.handle)
            except FabricError as error:
                yield post, f"{post.op.lower()}_failed", str(error)
                continue
            if done:
                self._fabric.release(post.handle)
                self._open.remove(post)
                self.meter.add(post.descriptors, post.nbytes, self._clock() - post.began_at)
                wire_s = self._clock() - post.posted_at
                event = "written" if post.op == "WRITE" else "read"
                self._story.note(post.register.transfer_id, event, nbytes=post.nbytes, wire_ms=round(wire_s * 1e3, 3))
                self._stats.moved(
                    plan_s=post.posted_at - post.began_at,
                    post_s=post.post_s,
                    wire_s=wire_s,
                    nbytes=post.nbytes,
                    descriptors=post.descriptors,
                )
                yield post, "", ""
            elif self._clock() - post.posted_at > self._limit_s:
                yield post, "transfer_timeout", f"a {post.op} took more than {self._limit_s:g} s"

    def _is_over(self, post: Post) -> bool:
        try:
            return self._fabric.check(post.handle)
        except FabricError:
            return True

    def drop(self, peer: str) -> list[Post]:
        """Give up everything posted to this peer; what was given up. `poll` says `LOST` of each that has a handle."""
        lost = [post for post in self._open if post.peer == peer]
        self._open = [post for post in self._open if post.peer != peer]
        self._lost += [post for post in lost if post.handle is not None]
        self._stats.failed(len(lost))
        return lost

    def close(self) -> None:
        for key in {post.peer for post in self._open}:
            self.drop(key)
        for post in self._lost:
            self._fabric.release(post.handle)
        self._lost.clear()
