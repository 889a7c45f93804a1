"""One transfer between two cores, brought to a stage; then something breaks; then everybody goes on as he would.

Real cores, bytes and machines, over the in-memory fabric and channel, with the house's clock. A `Scene` records what
each side was told, when, and which metrics moved, and sees to it that nobody touches blocks that are others' by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from transfer_house import DP, PP, House, Rank

from kvferry.observe.transfers import TransferMetrics
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.channel import Got

STAGES = ("before", "registered", "met", "flying", "landed", "decoding")
MODES = ("push", "stream", "pull", "pull-write")
"""`pull-write`: mode pull, and P writes; in `pull` D reads."""
LIMITS = {
    "lease_s": 6.0,
    "registration_timeout_s": 4.0,
    "connect_timeout_s": 2.0,
    "prefill_timeout_s": 25.0,
    "transfer_timeout_s": 10.0,
}
"""Far enough from each other that a time tells which limit it was."""
STEP_S = 0.125
COMPUTES_S = 1.0  # prefill is done, or a decode request gets its blocks, so long after the fault
LONGEST_S = 60.0

TOKENS = 10
P_BLOCKS, P_ANEW, D_BLOCKS = (1, 2, 3), (11, 12, 13), (7, 5, 9)
FRESH_P, FRESH_D = (4, 6, 8), (10, 2, 14)
OTHERS_P, OTHERS_D = 0xDD, 0xEE  # what blocks hold once they are somebody else's

_NEWS = (wire.Begin, wire.Seal, wire.Grant, wire.Landed, wire.Failed, wire.Fetched)
_TO_P = (wire.Fetched, wire.Cancel, wire.Register, wire.Waiting)
_P_SAYS = (wire.Begin, wire.Seal, wire.Grant, wire.Landed, wire.Failed)


class Died(BaseException):
    """The process whose step runs ends here."""


@dataclass
class Told:
    """`code` 'ok' or an error's; None: nothing came. Seconds since the fault."""

    code: str | None = None
    at: float | None = None
    freed: float | None = None
    ends: int = 0


@dataclass
class Meter:
    """A rank's metrics as a scraper sees them."""

    rank: Rank
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    quarantined: float = 0.0

    def __post_init__(self) -> None:
        make = {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        self.metrics = TransferMetrics(make, ["engine"], {0: ["0"]})
        self.before = self.read()

    def feed(self) -> None:
        """As the engine does after each step."""
        new = self.rank.core.stats.take()
        if new is not None:
            for levels in new.levels.values():
                self.quarantined = max(self.quarantined, levels.quarantined_blocks)
            self.metrics.observe(new)

    def read(self) -> dict[str, float]:
        self.feed()
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                labels = ",".join(sample.labels[key] for key in ("side", "outcome") if key in sample.labels)
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found

    def moved(self) -> set[str]:
        now = self.read()
        names = (
            "kvferry:transfers_total",
            "vllm:nixl_num_failed_transfers_total",
            "vllm:nixl_num_kv_expired_reqs_total",
        )
        out = {
            name
            for name, value in now.items()
            if name.startswith(names) and value > self.before.get(name, 0.0)
        }  # fmt: skip
        return out | ({"kvferry:quarantined_blocks"} if self.quarantined else set())


class Scene(House):
    """`strike(scene)` breaks something. `run_to(stage)` calls it there; `play` lets time pass until all has ended."""

    def __init__(self, mode: str, strike: Callable[[Scene], None], p_ahead: float = 0.0, **config: object) -> None:
        super().__init__()
        self.p_ahead = p_ahead
        self.mode, _, writes = mode.partition("-")
        self.reads, self._strike = mode == "pull", strike
        by = "write" if writes else "read"
        self.config = {"mode": self.mode, "pull_by": by, "stream_chunk_bytes": 1, **LIMITS, **config}
        self.told = {"P": Told(), "D": Told()}
        self.struck_at: float | None = None
        self.stage = ""
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.d_comes, self.p_goes_on = True, True
        self.paused = False  # what was held stays so
        self.d_landed, self.p_handed = False, False
        self.handed_at = 0.0
        """By the house's clock."""
        self.verdict: wire.Verdict | None = None
        """What D says of its failure as soon as its engine knows of it."""
        self.waits_at_d = False
        self._inside: Rank | None = None
        self._reborn: Callable[[], Rank] | None = None
        self.every_step: Callable[[], None] = lambda: None
        self.meters: list[Meter] = []
        self.registration = b""
        self.others: list[tuple[str, float]] = []
        self.P_SAYS = _P_SAYS
        self.dead: list[Rank] = []
        self.p = self.start_p()
        self.d = self.start_d()
        self.run()
        self.first_d = self.d
        self.source_blocks = P_BLOCKS
        self.truth = self.p.memory.copy()

    # -- who is there -----------------------------------------------------------------------------------------------

    def start_p(self, **config: object) -> Rank:
        made = self.rank("P", "producer", PP, ahead=self.p_ahead, **{**self.config, **config})
        made.memory[:] = np.random.default_rng(1).integers(1, 200, made.memory.shape, np.uint8)
        self.meters.append(Meter(made))
        self.p = made
        return made

    def start_d(self, **config: object) -> Rank:
        made = self.rank("D", "consumer", DP, peers=[f"127.0.0.1:{PP}"], **{**self.config, **config})
        self.meters.append(Meter(made))
        self.d = made
        return made

    def die(self, rank: Rank, again: Callable[[], Rank] | None = None) -> None:
        """`again`: what starts it anew, at once."""
        self.dead.append(rank)
        if self._inside is rank:
            self._reborn = again
            raise Died
        self.kill(rank)
        if again is not None:
            again()

    def run(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            for one in list(self.ranks):
                if one.frozen or one not in self.ranks:
                    continue
                try:
                    one.core.step(0.0)
                except Died:
                    self._inside = None
                    self.kill(one)
                    if self._reborn is not None:
                        self._reborn()
        for meter in self.meters:
            meter.feed()
        if self.verdict is None and self.told["D"].code not in (None, "ok") and self.d not in self.dead:
            self.verdict = self.why()

    # -- what they are told -----------------------------------------------------------------------------------------

    def heard(self, rank: Rank, result: cmd.Result) -> None:
        super().heard(rank, result)
        if result.transfer_id.startswith("other"):
            assert self.struck_at is not None
            self.others.append((result.code, self.now - self.struck_at))
        if result.transfer_id != "t":
            return
        if isinstance(result, cmd.Rewound):
            rank.memory[:, list(self.source_blocks)] = OTHERS_P
            self.source_blocks = P_ANEW
            self.later.append((self.now + COMPUTES_S, self.hand_over))
            return
        side = self.told["P" if isinstance(result, cmd.Sent) else "D"]
        since = None if self.struck_at is None else self.now - self.struck_at
        if side.code is None:
            side.code, side.at = ("ok" if getattr(result, "ok", False) else result.code), since
        if isinstance(result, cmd.Failing):
            return
        side.ends += 1
        side.freed = since
        if isinstance(result, cmd.Sent):
            rank.memory[:, list(self.source_blocks)] = OTHERS_P
        elif not result.ok:
            rank.memory[:, list(D_BLOCKS)] = OTHERS_D

    # -- what the engines do ----------------------------------------------------------------------------------------

    def expect(self, tid: str = "t") -> None:
        self.p.core.submit(cmd.Expect(tid, f"p-{tid}", self.mode, 1, TOKENS))

    def land(self, tid: str = "t", blocks: tuple[int, ...] = D_BLOCKS) -> None:
        self.d_landed = self.d_landed or tid == "t"
        self.d.core.submit(cmd.Land(tid, f"d-{tid}", self.mode, "127.0.0.1", PP, "P", 1, 0, TOKENS, blocks))

    def first_chunk(self) -> None:
        self.p.core.submit(cmd.Grown("t", "p-t", P_BLOCKS[:1], 4))

    def hand_over(self, tid: str = "t", blocks: tuple[int, ...] | None = None) -> None:
        if tid == "t" and not self.p_handed:
            self.p_handed, self.handed_at = True, self.now
        blocks = self.source_blocks if blocks is None else blocks
        self.p.core.submit(cmd.Ready(tid, f"p-{tid}", blocks, TOKENS))

    def some(self) -> None:
        """Stream: the first chunk; else all of it."""
        self.first_chunk() if self.mode == "stream" else self.hand_over()

    # -- the play ---------------------------------------------------------------------------------------------------

    def run_to(self, stage: str) -> None:
        """Bring the transfer there, and strike."""
        self.stage = stage
        at = STAGES.index(stage)
        self.expect()
        if at >= 1:
            self.network.filter = self._remember_registration
            self.land()
        self.run()
        self.all_is_heard()
        if stage == "met":
            self.world.on_post = self._at_post
            self.some()
            self.run()
            assert self.struck_at is not None, "nothing was posted"
            return
        if stage in ("flying", "landed"):
            self.world.hold = True
            self.some()
            self.run()
            assert len(self.world.copies) == 1 and len(self.world.copies[0].rows) > 1
        if stage == "flying":
            self.world.copies[0].move(1)
        if stage == "landed":
            self._all_but_the_word()
        if stage == "decoding":
            self.some()
            if self.mode == "stream":
                self.hand_over()
            self.run()
            assert [self.told[side].code for side in "PD"] == ["ok", "ok"]
        self._now_strike()

    def _remember_registration(self, data: bytes) -> list[bytes]:
        if self.says(data, wire.Register):
            self.registration = data
        return [data]

    def _all_but_the_word(self) -> None:
        if self.mode == "stream":
            self.hand_over()
            self.run()
        self.network.hold = True
        self.release_copies()
        self.run()
        assert not self.world.copies and self.told["D"].code is None
        assert len(self.on_the_way()) == 1

    def on_the_way(self) -> list[wire.AnyMessage]:
        queues = [queue for link in self.network.links for queue in (link.to_listener, link.to_dialler)]
        found = [codec.decode(data) for queue in queues for data in queue]
        return [one for one in found if not isinstance(one, wire.Beat)]

    def release_copies(self) -> None:
        self.world.hold = False
        for copy in self.world.copies:
            copy.held = False

    def release(self) -> None:
        """What was held goes on."""
        self.release_copies()
        self.network.hold = False
        self.network.deliver()

    def _at_post(self, op: str, owner: str, target: str) -> None:
        self.world.on_post = lambda op, owner, target: None
        self._inside = self.p if op == "WRITE" else self.d
        try:
            self._now_strike()
            self.world.on_post(op, owner, target)  # the strike may have made posts fail
        finally:
            self._inside = None

    def _now_strike(self) -> None:
        self.struck_at = self.now
        for meter in self.meters:
            meter.before, meter.quarantined = meter.read(), 0.0
        soon = self.now + COMPUTES_S
        self.later.append((soon, self._come))
        self.later.append((soon, self._go_on))
        self._strike(self)
        if not self.paused:
            self.release()

    def _come(self) -> None:
        if self.d_comes and not self.d_landed:
            self.land()

    def _go_on(self) -> None:
        if self.p_goes_on and not self.p_handed:
            self.hand_over()

    def quiet(self) -> bool:
        held = [n for one in self.ranks for what, n in one.core.open_counts().items() if what != "peers"]
        return not any(held) and not self.later and not self.world.copies

    def play(self) -> None:
        """Until nothing is open any more, or too long."""
        assert self.struck_at is not None
        self.run()
        while self.now - self.struck_at < LONGEST_S:
            due = [one for one in self.later if one[0] <= self.now]
            self.later = [one for one in self.later if one[0] > self.now]
            for _, action in due:
                action()
            self.every_step()
            self.run(3)
            if self.quiet():
                return
            self.now += STEP_S
        raise AssertionError(f"not over after {LONGEST_S:g} s: {[one.core.open_counts() for one in self.ranks]}")

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, action))

    def moved(self) -> set[str]:
        """Metrics of the engines that are still there."""
        out: set[str] = set()
        for meter in self.meters:
            if meter.rank not in self.dead:
                out |= meter.moved()
        return out

    # -- what breaks ------------------------------------------------------------------------------------------------

    def next_news(self, what: Callable[[wire.AnyMessage, bytes], list[bytes]], kinds: tuple[type, ...] = _NEWS) -> None:
        """The next message of these kinds is changed by `what(message, data)`; if one is on its way, that one."""
        for link in self.network.links:
            for queue in (link.to_listener, link.to_dialler):
                for index, data in enumerate(queue):
                    message = codec.decode(data)
                    if isinstance(message, kinds):
                        del queue[index]
                        for put in reversed(what(message, data)):
                            queue.insert(index, put)
                        return

        def sift(data: bytes) -> list[bytes]:
            message = codec.decode(data) if data else None
            if not isinstance(message, kinds):
                return [data]
            self.network.filter = lambda data: [data]
            return what(message, data)

        self.network.filter = sift

    def say_again(self, message: wire.AnyMessage, data: bytes) -> None:
        """On the connection that stands then."""
        if isinstance(message, _TO_P):
            speaker, keys = self.d, list(self.d.core._peers.by_key)
        else:
            speaker, keys = self.p, list(self.p.core._peers.by_key)
        for key in keys:
            speaker.core._channel.send(key, data)

    def say_again_registration(self) -> None:
        """As D said it the first time, which it may have long forgotten."""
        data = self.registration
        for key in list(self.d.core._peers.by_key):
            self.d.core._channel.send(key, data)

    def bring_others(self, count: int) -> None:
        """Prompts that are computed, and that no decode engine comes for."""
        for number in range(count):
            self.p.core.submit(cmd.Expect(f"other{number}", f"p-other{number}", self.mode, 1, 4))
            self.p.core.submit(cmd.Ready(f"other{number}", f"p-other{number}", (4,), 4))

    def abandon(self, reason: str) -> None:
        """The router, on a connection of its own."""
        router = self.network.channel("127.0.0.1", 7700)
        key = router.dial("127.0.0.1", PP)
        router.poll(0)
        said = router.send(key, codec.encode(wire.Abandon(transfer_id="t", reason=reason)))
        assert said
        self.after(2.0, router.close)

    def why(self) -> wire.Verdict:
        """What D tells the router that asks why, on a connection of its own, which nothing holds back."""
        router = self.network.channel("127.0.0.1", 7701)
        key = router.dial("127.0.0.1", DP)
        router.poll(0)
        assert router.send(key, codec.encode(wire.Why(transfer_id="t")))
        [link] = [one for one in self.network.links if one.dialler is router]
        said: list[wire.AnyMessage] = []
        while link.to_listener:
            link.listener.events.append(Got(link.listener_key, link.to_listener.popleft()))
        self.d.core.step(0.0)
        said += [codec.decode(one.data) for one in router.poll(0) if isinstance(one, Got)]
        said += [codec.decode(data) for data in link.to_dialler]
        router.close()
        [verdict] = [one for one in said if isinstance(one, wire.Verdict)]
        return verdict

    @property
    def p_answers_first(self) -> bool:
        """P has computed the prompt, and said so to the router, before D knows how the transfer ends."""
        assert self.struck_at is not None
        ends = self.told["D"].at
        return self.p_handed and (ends is None or self.handed_at <= self.struck_at + ends)

    @staticmethod
    def says(data: bytes, kind: type) -> bool:
        return bool(data) and isinstance(codec.decode(data), kind)

    def all_is_heard(self) -> None:
        self.network.filter = lambda data: [data]

    # -- afterwards -------------------------------------------------------------------------------------------------

    def bytes_are_right(self) -> None:
        """What D was told is there is there; what went back to the pool was not written to since."""
        if self.first_d in self.dead:
            return
        got = self.d.memory[:, list(D_BLOCKS)]
        if self.told["D"].code == "ok":
            assert (got == self.truth[:, list(P_BLOCKS if self.source_blocks == P_BLOCKS else P_ANEW)]).all()
        elif self.told["D"].ends:
            assert (got == OTHERS_D).all(), "written to after it went back"
        elif self.d_landed and not self.d_comes:
            return
        else:
            assert not got.any()

    def fresh_transfer(self) -> None:
        """The survivors, and whoever is started in place of the dead, go on."""
        self.every_step, self.world.on_post = lambda: None, lambda op, owner, target: None
        self.all_is_heard()
        self.release()
        for side, start in (("p", self.start_p), ("d", self.start_d)):
            if getattr(self, side) not in self.ranks:
                start()
        self.wait(3.0)
        self.expect("fresh")
        self.land("fresh", FRESH_D)
        self.hand_over("fresh", FRESH_P)
        self.wait(2.0)
        ends = [one.results[-1] for one in (self.p, self.d)]
        assert ends == [cmd.Sent("p-fresh", "fresh", True, "", ""), cmd.Received("d-fresh", "fresh", True, "", "")]
        assert (self.d.memory[:, list(FRESH_D)] == self.p.memory[:, list(FRESH_P)]).all()
