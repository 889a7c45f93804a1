"""P machines and D machines joined by lossy links, under any schedule Hypothesis can think of.

The invariant: every source that got ready is released exactly once and never while a copy from its blocks may be under
way; every landing has exactly one outcome, never while a copy into its blocks is under way, and a good one only if the
right bytes are there; when all timers have run out, both sides hold nothing. C39, C40, C41, C54, C61.

The links keep order and can be cut at any moment; each side then gets what had arrived, and `peer_gone`, in its own
time: P may hear of it long after D. Copies carry tags. Cutting a link doesn't call back WRITEs under way (NIXL doesn't
either): P gives them up, says that its word on them is not final, and holds the greeting of that D rank until they have
ended. A P may die, its copies with it, and another one takes its place. The model's one assumption is that a P that
lives answers at its address, so that D waits for its welcome. In mode `stream` the engine takes the blocks of a prompt
back in its middle (preemption, abort), but only when P says that nothing reads them; what was computed again differs
from what was there before, and no good landing may hold a mix. In mode `pull` some D ranks read from a P rank, into
others it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from pair_parts import DOWN, DS, JUNK, PS, TRANSFERS, Copying, Link, Plan

from kvferry.ids import TransferId
from kvferry.protocol import instructions as ask
from kvferry.protocol import landing, rendezvous
from kvferry.protocol import messages as wire
from kvferry.protocol.consistency import inconsistencies, left_over
from kvferry.protocol.stream import Pace, Span


class Pair(RuleBasedStateMachine):
    walked = 0  # steps of all runs

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.now = 0.0
        self.lingers = data.draw(st.sampled_from([0, 1, 2]))  # WRITEs to a lost peer go on: none, all, every other
        self.readers = {(d, p): data.draw(st.booleans()) for d in range(DS) for p in range(PS)}  # pull: else P writes
        self.orphans: list[Copying] = []
        self.spent: set[tuple[int, TransferId]] = set()  # of a P that has died
        flying = data.draw(st.sampled_from([1, 2, 4]))
        self.flying = flying
        self.P = [self.new_p() for _ in range(PS)]
        self.D = [landing.Landings(dial_s=3, prefill_s=20, transfer_s=6, fence_s=4, settle_s=0.75) for _ in range(DS)]
        self.links: dict[tuple[int, int], Link] = {}
        self.old: list[Link] = []
        self.epoch = 0
        self.mem_p = [{b: JUNK for b in range(12)} for _ in range(PS)]
        self.mem_d = [{b: {} for b in range(12)} for _ in range(DS)]
        self.free_p = [list(range(12)) for _ in range(PS)]
        self.free_d = [list(range(12)) for _ in range(DS)]
        self.owner: dict[tuple[int, int], str] = {}  # (d, block) -> request
        self.writes: list[Copying] = []
        self.reads: list[Copying] = []
        self.expected: set[tuple[int, TransferId]] = set()
        self.readied: dict[tuple[int, TransferId], tuple[int, ...]] = {}
        self.growing: dict[tuple[int, TransferId], list[int]] = {}  # stream: the blocks that hold KV so far
        self.attempts: Counter = Counter()
        self.rewinding: set[tuple[int, TransferId]] = set()
        self.ended: set[tuple[int, TransferId]] = set()  # aborted
        self.over: set[tuple[int, TransferId]] = set()  # by the engine, which preempts it no more
        self.released: Counter = Counter()
        self.opened: dict[str, tuple[int, landing.Destination]] = {}
        self.outcomes: dict[str, landing.Outcome] = {}
        self.doomed: set[str] = set()
        self.plans = []
        for i in range(TRANSFERS):
            ps = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
            ds = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
            fans = data.draw(st.booleans())
            mode = data.draw(st.sampled_from(["push", "pull", "stream", "stream"]))
            fan_out, legs = (len(ds), 1) if fans else (1, len(ds))
            pace = Pace(*data.draw(st.sampled_from([(1, 1, 9), (1, 1, 1), (1, 2, 9), (2, 1, 2)])))
            self.plans.append(Plan(TransferId(f"t{i}"), mode, ps, ds, fan_out, legs, pace))
        for d in range(DS):
            for p in range(PS):
                self.connect(d, p)

    def new_p(self) -> rendezvous.Rendezvous:
        return rendezvous.Rendezvous(lease_s=10, unseen_s=8, max_flying=self.flying)

    # -- carrying out instructions ----------------------------------------------------------------------------------

    def run_p(self, p: int, instructions: list[rendezvous.Instruction]) -> None:
        for one in instructions:
            if isinstance(one, ask.Send):
                link = self.by_key(one.peer)
                assert not link.gone_p, "P talks to a peer that it took leave of"
                if not link.cut:
                    link.to_d.append(one.message)
                    link.sent_d.append(one.message)
            elif isinstance(one, ask.StartWrite):
                link = self.by_key(one.peer)
                assert not link.gone_p
                key = (p, one.register.transfer_id)
                known = self.readied.get(key) or tuple(self.growing.get(key, ()))
                assert one.block_ids == known, "P writes from blocks that it was not given"
                assert key not in self.rewinding, "P writes on while the engine wants its blocks back"
                self.writes.append(Copying(p, link.d, one.peer, one.register, one.block_ids, one.span))
            elif isinstance(one, ask.Rewound):
                key = (p, one.transfer_id)
                assert not [w for w in self.writes if (w.p, w.register.transfer_id) == key], "rewound under a WRITE"
                self.rewinding.discard(key)
            elif isinstance(one, ask.Release):
                key = (p, one.transfer_id)
                self.released[key] += 1
                if key in self.growing:
                    self.readied[key] = tuple(self.growing.pop(key))
                    self.rewinding.discard(key)
                assert self.released[key] == 1 and key in self.readied
                assert not [w for w in self.writes if (w.p, w.register.transfer_id) == key], "released under a WRITE"
                for read in self.reads:
                    if (read.p, read.register.transfer_id) == key:
                        assert self.by_key(read.key).leaving, "released under a READ"
                for block in self.readied[key]:
                    self.mem_p[p][block] = JUNK
                    self.free_p[p].append(block)

    def run_d(self, d: int, instructions: list[landing.Instruction]) -> None:
        for one in instructions:
            if isinstance(one, ask.Send):
                link = self.link(d, one.peer)
                if link is not None and not link.cut:
                    link.to_p.append(one.message)
                    link.sent_p.append(one.message)
            elif isinstance(one, landing.StartRead):
                link = self.link(d, one.peer)
                assert link is not None
                whole = Span(one.register.start_token, one.register.end_token)
                self.reads.append(Copying(link.p, d, link.key, one.register, one.source_block_ids, whole))
            elif isinstance(one, landing.Doomed):
                request = one.destination.request
                assert one.code and request not in self.outcomes and request not in self.doomed
                self.doomed.add(request)
            elif isinstance(one, landing.Outcome):
                self.take_outcome(d, one)

    def take_outcome(self, d: int, outcome: landing.Outcome) -> None:
        where = outcome.destination
        assert where.request not in self.outcomes, "second outcome"
        self.outcomes[where.request] = outcome
        assert not (outcome.ok and where.request in self.doomed), "called lost, then good"
        for copy in self.writes + self.orphans + self.reads:
            mine = copy.d == d and copy.register.block_ids == where.block_ids
            assert not (mine and copy.register.transfer_id == where.transfer_id), "outcome under a copy"
        if outcome.ok:
            assert outcome.code == ""
            for peer, _ in where.peers:
                for i, block in enumerate(where.block_ids[: where.end_token - where.start_token]):
                    have = self.mem_d[d][block].get(int(peer[1:]))
                    last = self.attempts[int(peer[1:]), where.transfer_id]
                    wanted = (where.transfer_id, int(peer[1:]), where.start_token + i, last)
                    assert have == wanted, "wrong bytes, called good"
        else:
            assert outcome.code and outcome.reason
        for block in where.block_ids:
            del self.owner[d, block]
            self.mem_d[d][block] = {}
            self.free_d[d].append(block)

    # -- links ------------------------------------------------------------------------------------------------------

    def by_key(self, key: str) -> Link:
        return next(one for one in [*self.links.values(), *self.old] if one.key == key)

    def link(self, d: int, peer: str) -> Link | None:
        link = self.links.get((d, int(peer[1:])))
        return None if link is None or link.gone_d or not link.welcomed else link

    def may_write(self, d: int) -> Callable[[str], bool]:
        """As D's peers say it: who is there has not welcomed us again."""
        return lambda peer: self.link(d, peer) is None

    def connect(self, d: int, p: int) -> None:
        last = self.links.get((d, p))
        if last is not None:
            if not last.gone_p:
                self.gone_at_p(last)  # P takes leave of an engine's old connection when it greets anew
            self.old.append(last)
        self.epoch += 1
        link = self.links[d, p] = Link(d, p, f"d{d}-{self.epoch}")
        self.welcome(link)

    def welcome(self, link: Link) -> None:
        """P's answer to a greeting: not while anything that it had posted before can reach who greets."""
        if not any((one.d, one.p) == (link.d, link.p) for one in self.orphans) and not link.cut:
            link.welcomed = True
            self.run_d(link.d, self.D[link.d].connected(f"p{link.p}", self.now))

    def cut_link(self, link: Link) -> None:
        if not link.cut:
            link.cut = True
            link.to_p.append(DOWN)
            link.to_d.append(DOWN)

    def gone_at_p(self, link: Link) -> None:
        link.leaving, machine = True, self.P[link.p]
        link.to_p.clear()
        lost = [w for w in self.writes if w.key == link.key]
        self.writes = [w for w in self.writes if w.key != link.key]
        for write in lost:  # as in the core: D is told why, if it can be reached
            reg_id = write.register.reg_id
            write.orphan = self.lingers == 1 or (self.lingers == 2 and reg_id % 2 == 0)
            if write.orphan:
                self.orphans.append(write)
            over = not write.orphan
            self.run_p(link.p, machine.write_failed(link.key, reg_id, "lost", self.now, lost=True, over=over))
        self.run_p(link.p, machine.peer_gone(link.key, "lost", self.now))
        link.gone_p = True
        self.cut_link(link)

    def gone_at_d(self, link: Link) -> None:
        link.gone_d, machine = True, self.D[link.d]
        link.to_d.clear()
        lost = [r for r in self.reads if r.key == link.key]
        self.reads = [r for r in self.reads if r.key != link.key]
        self.run_d(link.d, machine.peer_gone(f"p{link.p}", "peer_gone", "lost", self.now))
        for read in lost:
            self.run_d(link.d, machine.read_failed(read.register.reg_id, "lost", self.now))

    def deliver_to_p(self, link: Link) -> None:
        message, machine, now = link.to_p.popleft(), self.P[link.p], self.now
        if message is DOWN:
            self.gone_at_p(link)
        elif isinstance(message, wire.Register):
            pace = self.plans[int(message.transfer_id[1:])].pace
            self.run_p(link.p, machine.register(link.key, message, now, pace, self.readers[link.d, link.p]))
        elif isinstance(message, wire.Cancel):
            self.run_p(link.p, machine.cancel(link.key, message.reg_id, message.reason, now))
        else:
            assert isinstance(message, wire.Fetched)
            self.run_p(link.p, machine.fetched(link.key, message.reg_id, message.ok, now))

    def deliver_to_d(self, link: Link) -> None:
        message, machine, now = link.to_d.popleft(), self.D[link.d], self.now
        if message is DOWN:
            self.gone_at_d(link)
        elif isinstance(message, wire.Begin):
            self.run_d(link.d, machine.begun(message.reg_id, message.sealed, now))
        elif isinstance(message, wire.Seal):
            self.run_d(link.d, machine.sealed(message.reg_id, now))
        elif isinstance(message, wire.Grant):
            self.run_d(link.d, machine.granted(message.reg_id, message.block_ids, now))
        elif isinstance(message, wire.Landed):
            self.run_d(link.d, machine.landed(message.reg_id, now))
        else:
            assert isinstance(message, wire.Failed)
            self.run_d(link.d, machine.failed(message.reg_id, message.code, message.reason, now, message.final))

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, one: Copying, upto: int) -> None:
        wanted, span = one.register, one.span
        for i in range(one.done, min(upto, span.end_token - span.start_token)):
            block = wanted.block_ids[span.start_token - wanted.start_token + i]
            assert self.owner.get((one.d, block)) == f"{wanted.transfer_id}@{one.d}", "bytes into foreign blocks"
            self.mem_d[one.d][block][one.p] = self.mem_p[one.p][one.source[span.start_token + i]]
            one.done = i + 1

    def finish_write(self, write: Copying, ok: bool) -> None:
        self.copy(write, 99 if ok else write.done)
        if write.orphan:
            self.orphans.remove(write)
            held = self.links[write.d, write.p]
            if not held.welcomed and not held.gone_d:
                self.welcome(held)
            return
        self.writes.remove(write)
        reg_id, machine = write.register.reg_id, self.P[write.p]
        if ok:
            self.run_p(write.p, machine.wrote(write.key, reg_id, self.now, nbytes=1, descriptors=1))
        else:
            self.run_p(write.p, machine.write_failed(write.key, reg_id, "broken", self.now))

    def finish_read(self, read: Copying, ok: bool) -> None:
        self.copy(read, 99 if ok else read.done)
        self.reads.remove(read)
        reg_id, machine = read.register.reg_id, self.D[read.d]
        done = machine.read_done(reg_id, self.now) if ok else machine.read_failed(reg_id, "broken", self.now)
        self.run_d(read.d, done)

    # -- rules ------------------------------------------------------------------------------------------------------

    @rule(
        i=st.integers(0, TRANSFERS - 1),
        tokens=st.sampled_from([(0, 3), (0, 2), (1, 3)]),
        order=st.permutations(["expect", "grow", "ready", "land", "deliver"]),
        without=st.sampled_from([""] * 4 + ["ready", "land", "deliver"]),
    )
    def go(self, i: int, tokens: tuple[int, int], order: list[str], without: str) -> None:
        """Most of a transfer at once, so that copies are under way when the other rules strike."""
        plan = self.plans[i]
        for d in plan.ds:
            for p in plan.ps:
                self.reconnect(d, p)
        for step in [*order, "ready", "deliver"]:
            if step == without:
                continue
            if step == "deliver":
                self.deliver_everything()
            for p in plan.ps:
                if step == "expect" and (p, plan.tid) not in self.expected:  # nor spent
                    self.expect(i, p)
                if step == "grow":
                    self.grow(i, p, 1)
                if step == "ready":
                    self.ready(i, p, 3)
            for d in plan.ds:
                if step == "land":
                    self.land(i, d, tokens, False)

    @rule(i=st.integers(0, TRANSFERS - 1), p=st.integers(0, PS - 1))
    def expect(self, i: int, p: int) -> None:
        plan = self.plans[i]
        if p in plan.ps and (p, plan.tid) not in self.spent:
            self.expected.add((p, plan.tid))
            self.run_p(p, self.P[p].expect(plan.tid, plan.mode, plan.fan_out, self.now))  # type: ignore[arg-type]

    @rule(i=st.integers(0, TRANSFERS - 1), p=st.integers(0, PS - 1), n=st.sampled_from([3, 3, 3, 2]))
    def ready(self, i: int, p: int, n: int) -> None:
        tid = self.plans[i].tid
        if (p, tid) in self.expected and (p, tid) not in self.readied and len(self.free_p[p]) >= n:
            had = self.growing.get((p, tid), [])
            if len(had) > n or (p, tid) in self.rewinding or (had and (p, tid) in self.ended):
                return
            blocks = (*had, *(self.free_p[p].pop() for _ in range(n - len(had))))
            self.growing.pop((p, tid), None)
            self.readied[p, tid] = blocks
            self.fill(p, tid, blocks)
            self.run_p(p, self.P[p].ready(tid, blocks, n, self.now))

    def fill(self, p: int, tid: TransferId, blocks: Sequence[int]) -> None:
        for at, block in enumerate(blocks):
            self.mem_p[p][block] = (tid, p, at, self.attempts[p, tid])

    @rule(i=st.integers(0, TRANSFERS - 1), p=st.integers(0, PS - 1), n=st.integers(1, 2))
    def grow(self, i: int, p: int, n: int) -> None:
        """Stream: prefill computes `n` tokens more; the prompt has three."""
        plan, key = self.plans[i], (p, self.plans[i].tid)
        have = self.growing.get(key, [])
        if (
            plan.mode != "stream"
            or key not in self.expected
            or key in self.readied
            or key in self.rewinding
            or key in self.ended
            or len(self.free_p[p]) < n
            or len(have) + n > 3
        ):
            return
        new = tuple(self.free_p[p].pop() for _ in range(n))
        self.growing[key] = have = [*have, *new]
        self.fill(p, plan.tid, have)
        self.run_p(p, self.P[p].grown(plan.tid, new, len(have), self.now))

    @rule(i=st.integers(0, TRANSFERS - 1), p=st.integers(0, PS - 1))
    def preempt(self, i: int, p: int) -> None:
        """Stream: the engine wants the blocks back, and waits until nothing reads them."""
        tid = self.plans[i].tid
        key = (p, tid)
        if not self.growing.get(key) or key in self.rewinding or key in self.over:
            return
        blocks = self.growing.pop(key)
        self.rewinding.add(key)
        self.attempts[key] += 1
        self.run_p(p, self.P[p].rewind(tid, self.now))
        while key in self.rewinding:
            mine = [w for w in self.writes if (w.p, w.register.transfer_id) == key]
            assert mine, "P keeps the engine waiting for nothing"
            self.finish_write(mine[0], True)
        for block in blocks:
            self.mem_p[p][block] = JUNK
            self.free_p[p].append(block)

    @rule(i=st.integers(0, TRANSFERS - 1), p=st.integers(0, PS - 1), by_engine=st.booleans())
    def abort(self, i: int, p: int, by_engine: bool) -> None:
        """The engine's request ended, or somebody else gave the transfer up, of which the engine knows nothing."""
        key = (p, self.plans[i].tid)
        held = by_engine and key not in self.over and bool(self.growing.get(key))
        self.ended.add(key)
        if by_engine:
            self.over.add(key)
        self.run_p(p, self.P[p].abort(self.plans[i].tid, "abandoned", "by the test", self.now, held))

    @rule(
        i=st.integers(0, TRANSFERS - 1),
        d=st.integers(0, DS - 1),
        tokens=st.sampled_from([(0, 3), (0, 2), (1, 3), (0, 0)]),
        odd=st.sampled_from([False] * 7 + [True]),
    )
    def land(self, i: int, d: int, tokens: tuple[int, int], odd: bool) -> None:
        plan, (start, end) = self.plans[i], tokens
        request = f"{plan.tid}@{d}"
        if d not in plan.ds or request in self.opened or len(self.free_d[d]) < end - start:
            return
        mode = plan.mode if not odd else {"push": "pull", "pull": "stream", "stream": "push"}[plan.mode]
        blocks = tuple(self.free_d[d].pop() for _ in range(end - start))
        for block in blocks:
            self.owner[d, block] = request
        peers = tuple((f"p{p}", plan.legs) for p in plan.ps)
        where = landing.Destination(request, plan.tid, mode, start, end, blocks, peers)  # type: ignore[arg-type]
        self.opened[request] = (d, where)
        up = {f"p{p}" for p in range(PS) if self.link(d, f"p{p}") is not None}
        self.run_d(d, self.D[d].open(where, up, self.now))

    @rule(i=st.integers(0, TRANSFERS - 1), d=st.integers(0, DS - 1))
    def cancel(self, i: int, d: int) -> None:
        self.run_d(d, self.D[d].cancel(f"{self.plans[i].tid}@{d}", "by the test", self.now))

    @rule(d=st.integers(0, DS - 1), p=st.integers(0, PS - 1), count=st.integers(1, 3), back=st.booleans())
    def deliver(self, d: int, p: int, count: int, back: bool) -> None:
        link = self.links[d, p]
        for _ in range(count):
            if back and link.to_d and not link.gone_d:
                self.deliver_to_d(link)
            if not back and link.to_p and not link.gone_p:
                self.deliver_to_p(link)

    @rule()
    def deliver_everything(self) -> None:
        for link in list(self.links.values()):
            while (link.to_d and not link.gone_d) or (link.to_p and not link.gone_p):
                if link.to_p and not link.gone_p:
                    self.deliver_to_p(link)
                if link.to_d and not link.gone_d:
                    self.deliver_to_d(link)

    @rule(d=st.integers(0, DS - 1), p=st.integers(0, PS - 1), pick=st.integers(0, 50), back=st.booleans())
    def resend(self, d: int, p: int, pick: int, back: bool) -> None:
        """What was said on this connection is said again, late."""
        link = self.links[d, p]
        sent = link.sent_d if back else link.sent_p
        queue = link.to_d if back else link.to_p
        if sent and not link.cut:
            queue.append(sent[pick % len(sent)])

    @rule(
        d=st.integers(0, DS - 1),
        p=st.integers(0, PS - 1),
        a=st.integers(0, 3),
        b=st.integers(0, 3),
        now=st.sampled_from([True, False, False]),
    )
    def cut(self, d: int, p: int, a: int, b: int, now: bool) -> None:
        """The connection breaks; `a` and `b` messages get through before that."""
        link = self.links[d, p]
        if now and not link.cut:
            for queue, keep in ((link.to_p, a), (link.to_d, b)):
                while len(queue) > keep:
                    queue.pop()
            self.cut_link(link)

    @precondition(lambda self: self.writes or self.reads)
    @rule(
        pick=st.integers(0, 50),
        by_p=st.booleans(),
        hear=st.sampled_from(["", "p", "d", "pd", "dp", "pd", "dp"]),
        again=st.booleans(),
        seconds=st.sampled_from([0.0, 0.8, 0.8, 5.0]),
    )
    def lose(self, pick: int, by_p: bool, hear: str, again: bool, seconds: float) -> None:
        """A connection breaks under a copy, or P cuts D off; mostly both hear of it, D comes back, time goes by."""
        copies = self.writes + self.reads
        link = self.by_key(copies[pick % len(copies)].key)
        if by_p and not link.gone_p:
            self.gone_at_p(link)
        self.cut_link(link)
        for side in hear:
            while side == "p" and link.to_p and not link.gone_p:
                self.deliver_to_p(link)
            while side == "d" and link.to_d and not link.gone_d:
                self.deliver_to_d(link)
        if again:
            self.reconnect(link.d, link.p)
        if seconds:
            self.wait(seconds)

    @rule(p=st.integers(0, PS - 1), now=st.sampled_from([True] + [False] * 5))
    def die(self, p: int, now: bool) -> None:
        """A P ends as by SIGKILL, its copies with it; who comes in its place knows nothing."""
        if not now:
            return
        for link in [link for link in [*self.links.values(), *self.old] if link.p == p and not link.gone_p]:
            link.gone_p = link.leaving = True
            link.to_p.clear()
            self.cut_link(link)
        self.writes = [one for one in self.writes if one.p != p]
        self.orphans = [one for one in self.orphans if one.p != p]
        for known in (self.expected, self.readied, self.growing, self.rewinding, self.ended, self.over, self.released):
            gone = {key for key in known if key[0] == p}
            self.spent |= gone
            for key in gone:
                known.discard(key) if isinstance(known, set) else known.pop(key)
        self.mem_p[p], self.free_p[p] = {b: JUNK for b in range(12)}, list(range(12))
        self.P[p] = self.new_p()

    @rule(d=st.integers(0, DS - 1), p=st.integers(0, PS - 1))
    def reconnect(self, d: int, p: int) -> None:
        if self.links[d, p].gone_d:
            self.connect(d, p)

    @precondition(lambda self: self.writes or self.orphans)
    @rule(pick=st.integers(0, 50), how=st.sampled_from(["part", "ok", "ok", "fail"]))
    def write(self, pick: int, how: str) -> None:
        flying = self.writes + self.orphans
        write = flying[pick % len(flying)]
        if how == "part":
            self.copy(write, write.done + 1)
        else:
            self.finish_write(write, how == "ok")

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 50), how=st.sampled_from(["part", "ok", "ok", "fail"]))
    def read(self, pick: int, how: str) -> None:
        read = self.reads[pick % len(self.reads)]
        if how == "part":
            self.copy(read, read.done + 1)
        else:
            self.finish_read(read, how == "ok")

    @rule(seconds=st.sampled_from([0.1, 0.8, 0.8, 3.5, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for p in range(PS):
            self.run_p(p, self.P[p].tick(self.now))
        for d in range(DS):
            self.run_d(d, self.D[d].tick(self.now, self.may_write(d)))

    @invariant()
    def machines_are_consistent(self) -> None:
        Pair.walked += 1
        for machine in [*self.P, *self.D] if hasattr(self, "links") else []:
            assert inconsistencies(machine) == []

    def teardown(self) -> None:
        if not hasattr(self, "links"):
            return
        for p, tid in self.expected:
            if (p, tid) not in self.readied:
                self.abort(int(tid[1:]), p, True)
        for _ in range(12):
            self.deliver_everything()
            for write in self.writes + self.orphans:
                if write in self.writes or write in self.orphans:
                    self.finish_write(write, True)
            for read in list(self.reads):
                if read in self.reads:
                    self.finish_read(read, True)
            self.deliver_everything()
            for d, p in list(self.links):
                self.reconnect(d, p)  # as D does while it waits for somebody
            self.wait(25.0)
        assert not self.writes and not self.orphans and not self.reads
        for machine in [*self.P, *self.D]:
            assert machine.open_count() == 0 and machine.next_due() is None
            assert left_over(machine) == []
        assert set(self.outcomes) == set(self.opened), "a landing without an outcome"
        assert set(self.released) == set(self.readied), "a source without its release"
        assert not self.owner and all(len(free) == 12 for free in self.free_p + self.free_d)
