"""Copies in flight: planned, posted and polled. Owned by the transfer core's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.config import ConnectorConfig
from kvferry.errors import FabricError
from kvferry.protocol import messages as wire
from kvferry.protocol.cost import LEAST_S, STAGED, CostMeter
from kvferry.protocol.layout import HeadShare, fan_in
from kvferry.protocol.plan import Plan, Route
from kvferry.protocol.stream import Span
from kvferry.story import Story
from kvferry.transfer.fabric import Fabric, Handle, Op, PeerName, has_ended
from kvferry.transfer.gather import WORTH, Gatherer, StagedSpan
from kvferry.transfer.peers import Identity, Peer
from kvferry.transfer.stats import Recorder


@dataclass
class Post:
    """Copies for one registration, all or a part of it. `posted_at`: when the post began, `began_at`: its plan, in the
    core's monotonic seconds. `post_s`: how long the call took. `staged`: they go gathered."""

    op: Op
    peer: Peer
    register: wire.Register
    plan: Plan
    posted_at: float
    began_at: float
    handle: Handle | None = None  # None: not posted, or staged
    staged: StagedSpan | None = None
    post_s: float = 0.0
    descriptors: int = 0

    @property
    def in_flight(self) -> bool:
        """Its bytes may arrive still."""
        return self.handle is not None or (self.staged is not None and bool(self.staged.writing))


LOST = "lost"
"""`Posts.poll`'s code for a post that has ended, one way or the other, after its peer was given up."""


class Posts:
    """A post that takes longer than `config.transfer_timeout_s` counts as broken.

    A posted copy can't be called back: the fabric goes on with it whatever becomes of the side channel, even if its
    handle is released. So those of a peer that was given up are kept, and polled, until the fabric says how they ended.
    """

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        layout: wire.Layout,
        fabric: Fabric,
        gatherer: Gatherer,
        story: Story,
        clock: Callable[[], float],
        stats: Recorder,
    ) -> None:
        self._identity, self._config, self._layout = identity, config, layout
        self._fabric, self.gatherer = fabric, gatherer
        self._story, self._clock, self._stats = story, clock, stats
        self._limit_s = config.transfer_timeout_s
        self._open: list[Post] = []
        self._lost: list[Post] = []
        self._routes: dict[tuple[Op, str], tuple[wire.Layout, Route | None]] = {}
        self.meter, self._staged_meter = CostMeter(), CostMeter(STAGED)

    def __len__(self) -> int:
        return len(self._open) + len(self._lost)

    def only_lost(self) -> bool:
        """What is in flight is of use to nobody."""
        return not self._open

    def reach(self, agent: PeerName) -> bool:
        """Copies from or to that agent are in flight, though its peer was given up."""
        return any(post.peer.agent == agent for post in self._lost)

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

    def route(self, op: Op, peer: Peer) -> Route | None:
        """Made once per connection. `op`: WRITE, from us to that peer; READ, from it to us, whoever posts. None as for
        `share_with`. Raises `PlanError`."""
        known = self._routes.get((op, peer.key))
        if known is None or known[0] is not peer.layout:
            share = self.share_with(op, peer)
            src, dst = (self._layout, peer.layout) if op == "WRITE" else (peer.layout, self._layout)
            known = self._routes[op, peer.key] = peer.layout, None if share is None else Route(src, dst, share)
        return known[1]

    def start(self, op: Op, peer: Peer, register: wire.Register, source_block_ids: tuple[int, ...], span: Span) -> bool:
        """Plan and post `span`; False if there is nothing to copy. `source_block_ids`: logical block 0 first.

        Raises `PlanError` (nothing was posted) or `FabricError` (some of it may be under way: cut the peer).
        """
        started = self._clock()
        route = self.route(op, peer)
        if route is None:
            return False
        source = source_block_ids[span.start_token // route.src.block_size :]
        first = span.start_token // route.dst.block_size - register.start_token // route.dst.block_size
        target = register.block_ids[first:]
        made = route.plan(source, target, span.start_token, span.end_token, span.first_plane, span.end_plane)
        if not made.descriptors:
            return False
        post = Post(op, peer, register, made, self._clock(), started)
        self._open.append(post)
        if op == "WRITE" and self._worth_staging(made, route):
            post.staged = self.gatherer.ask(peer, register, span, route, source)
        if post.staged is None:
            self._launch(post)
        return True

    def _worth_staging(self, plan: Plan, route: Route) -> bool:
        slots = self.gatherer.copies(plan, route)
        if self._config.staging != "auto" or not slots:
            return bool(slots) and self._config.staging == "always"
        if not self.meter.seen(plan.descriptors):
            return False  # what it would cost is a guess until one like it has gone
        direct = self.meter.cost.seconds(plan.descriptors, plan.total_bytes)
        staged = self._staged_meter.cost.seconds(slots, plan.total_bytes)
        return staged < WORTH * direct and direct - staged > LEAST_S

    def _launch(self, post: Post) -> None:
        writing, made, began = post.op == "WRITE", post.plan, self._clock()
        local, remote = (made.src, made.dst) if writing else (made.dst, made.src)
        peer = post.peer
        post.handle = self._fabric.post(post.op, peer.agent, local, remote, made.nbytes, peer.layout.device)
        post.post_s = self._clock() - began
        post.descriptors = made.descriptors
        self._note_posted(post)

    def _note_posted(self, post: Post) -> None:
        self._story.note(
            post.register.transfer_id,
            "posted",
            op=post.op,
            descriptors=post.descriptors,
            nbytes=post.plan.total_bytes,
            plan_ms=round((post.posted_at - post.began_at) * 1e3, 3),
            post_ms=round(post.post_s * 1e3, 3),
            staged=post.staged is not None,
        )

    def poll(self) -> Iterator[tuple[Post, str, str]]:
        """(post, code, reason) of each that ended: code '' if well. The caller cuts the peer of one that did not: some
        of its copies may be under way still, and the connection is broken for all."""
        for post in list(self._lost):
            if self._is_over(post):
                self._lost.remove(post)
                self._release(post)
                yield post, LOST, ""
        for post in list(self._open):
            if post not in self._open:
                continue  # went with its peer
            try:
                done = self._driven(post)
            except FabricError as error:
                yield post, f"{post.op.lower()}_failed", str(error)
                continue
            now = self._clock()
            if done:
                self._complete(post, now)
                yield post, "", ""
            elif now - post.posted_at > self._limit_s:
                yield post, "transfer_timeout", f"a {post.op} took more than {self._limit_s:g} s"

    def _driven(self, post: Post) -> bool:
        staged = post.staged
        if staged is None:
            return post.handle is not None and self._fabric.check(post.handle)
        if staged.refused:
            self.gatherer.close(staged)
            post.staged = None
            self._launch(post)
            return False
        done = self.gatherer.drive(staged)
        if staged.theirs and not post.descriptors:
            post.descriptors = staged.lane.loads
            self._note_posted(post)
        return done and not staged.stopped

    def _complete(self, post: Post, now: float) -> None:
        self._open.remove(post)
        seconds, staged = now - post.began_at, post.staged
        if staged is None:
            self._fabric.release(post.handle)
            self.meter.add(post.descriptors, post.plan.total_bytes, seconds)
            how = {}
        else:
            self.gatherer.close(staged)
            self._staged_meter.add(post.descriptors, post.plan.total_bytes, seconds)
            post.post_s = staged.post_s
            how = {"post_ms": round(staged.post_s * 1e3, 3), "gather_ms": round(staged.gather_s * 1e3, 3)}
        wire_s = now - post.posted_at
        event = "written" if post.op == "WRITE" else "read"
        facts = {"nbytes": post.plan.total_bytes, "wire_ms": round(wire_s * 1e3, 3), **how}
        self._story.note(post.register.transfer_id, event, **facts)
        self._stats.moved(
            plan_s=post.posted_at - post.began_at,
            post_s=post.post_s,
            wire_s=wire_s,
            nbytes=post.plan.total_bytes,
            descriptors=post.descriptors,
        )

    def _is_over(self, post: Post) -> bool:
        if post.staged is not None:
            return self.gatherer.ended(post.staged)
        return has_ended(self._fabric, post.handle)

    def _release(self, post: Post) -> None:
        if post.staged is not None:
            self.gatherer.close(post.staged)
        if post.handle is not None:
            self._fabric.release(post.handle)

    def drop(self, peer: str) -> list[Post]:
        """Give up everything posted to this peer; what was given up. `poll` says `LOST` of each that is in flight."""
        dropped = [post for post in self._open if post.peer.key == peer]
        self._open = [post for post in self._open if post.peer.key != peer]
        self._routes = {where: route for where, route in self._routes.items() if where[1] != peer}
        self._stats.failed(len(dropped))
        for post in dropped:
            if post.staged is not None:
                self.gatherer.stop(post.staged)
            if post.in_flight:
                self._lost.append(post)
            else:
                self._release(post)
        return dropped

    def close(self) -> None:
        for key in {post.peer.key for post in self._open}:
            self.drop(key)
        for post in self._lost:
            self._release(post)
        self._lost.clear()
