"""Transfer cores over the in-memory fabric and channel, and one thread that runs them all: `House`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.config import connector_config
from kvferry.protocol import messages as wire
from kvferry.story import Story
from kvferry.transfer import commands as cmd
from kvferry.transfer.areas import Areas
from kvferry.transfer.core import TransferCore
from kvferry.transfer.memory import MemoryNetwork, MemoryWorld
from kvferry.transfer.peers import Identity

PLANES, BLOCKS, BLOCK, TOKEN = 2, 16, 4, 8
DP, PP = 6600, 5600


@dataclass
class Rank:
    core: TransferCore
    memory: np.ndarray  # (planes, blocks, heads, block tokens, token bytes)
    areas: Areas
    results: list[cmd.Result] = field(default_factory=list)
    failing: list[cmd.Failing] = field(default_factory=list)
    frozen: bool = False

    def block(self, block: int, head: int = 0) -> np.ndarray:
        return self.memory[:, block, head]


class House:
    """Some ranks of P and D, a clock, and the means to break things."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.world, self.network = MemoryWorld(), MemoryNetwork()
        self.ranks: list[Rank] = []

    def rank(
        self, name, role, port, *, rank=0, tp=1, heads=2, total=2, fill=0, fingerprint="m", ahead=0.0, blocks=BLOCKS,
        staging_bytes=4096, **config,
    ) -> Rank:  # fmt: skip
        """`ahead`: seconds by which its clock differs from the house's. Where `pull_by` isn't given, D reads."""
        memory = np.full((PLANES, blocks, heads, BLOCK, TOKEN), fill, np.uint8)
        areas = Areas("cpu", staging_bytes)
        fabric = self.world.fabric(f"{name}{rank}")
        fabric.register([(memory.ctypes.data, memory.nbytes), *areas.regions], "cpu")
        plane_bytes = memory.nbytes // PLANES
        planes = tuple(
            wire.Plane(
                base=memory.ctypes.data + i * plane_bytes,
                block_stride=heads * BLOCK * TOKEN,
                head_stride=BLOCK * TOKEN,
                token_bytes=TOKEN,
            )
            for i in range(PLANES)
        )
        layout = wire.Layout(
            planes=planes,
            num_blocks=blocks,
            block_size=BLOCK,
            heads=heads,
            total_heads=total,
            divisible=True,
            device="cpu",
            fingerprint={"model": fingerprint},
        )
        results: list[cmd.Result] = []
        failing: list[cmd.Failing] = []
        core = TransferCore(
            Identity(name, rank, tp, role),
            connector_config({"side_channel_port": port, "pull_by": "read", **config}, {}),
            fabric,
            self.network.channel("127.0.0.1", port + rank),
            layout,
            areas,
            Story(None, role),
            lambda result: self.heard(made, result),
            clock=lambda: self.now + ahead,
        )
        made = Rank(core, memory, areas, results, failing)
        self.ranks.append(made)
        return made

    def heard(self, rank: Rank, result: cmd.Result) -> None:
        """What its engine is told."""
        (rank.failing if isinstance(result, cmd.Failing) else rank.results).append(result)

    def run(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            for one in list(self.ranks):
                if not one.frozen and one in self.ranks:
                    one.core.step(0.0)

    def wait(self, seconds: float, step: float = 0.25) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.run(3)

    def freeze(self, rank: Rank, frozen: bool = True) -> None:
        rank.frozen = rank.core._fabric.frozen = frozen

    def kill(self, rank: Rank) -> None:
        self.ranks.remove(rank)
        rank.core.close()

    def let_go(self) -> None:
        """Copies that were held back move again."""
        self.world.hold = False
        for copy in self.world.copies:
            copy.held = False

    def cut(self) -> None:
        for link in list(self.network.links):
            self.network.cut(link)

    def settled(self, *but: str) -> None:
        """Nothing is held anywhere."""
        for one in self.ranks:
            held = {what: n for what, n in one.core.open_counts().items() if n and what != "peers"}
            assert held == {}, one.core.identity
            assert one.core._requests == {} and one.core._waiting_moments == []
            assert one.areas.staging.lent == 0, one.core.identity
        assert self.world.copies == []


class Flag:
    """A moment that passes when the test says so."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


def pair(house, mode="push", **config):
    p = house.rank("P", "producer", PP, mode=mode, **config)
    d = house.rank("D", "consumer", DP, mode=mode, peers=[f"127.0.0.1:{PP}"], **config)
    house.run()
    return p, d


def expect(p, tid="t", mode="push", fan_out=1, request=None):
    p.core.submit(cmd.Expect(tid, request or f"p-{tid}", mode, fan_out))


def ready(p, tid="t", blocks=(1, 2, 3), tokens=10, request=None):
    p.core.submit(cmd.Ready(tid, request or f"p-{tid}", blocks, tokens))


def land(d, tid="t", mode="push", blocks=(7, 5, 9), start=0, end=10, engine="P", tp=1, port=PP):
    d.core.submit(cmd.Land(tid, f"d-{tid}", mode, "127.0.0.1", port, engine, tp, start, end, blocks))


def randomise(rank, seed=1):
    rank.memory[:] = np.random.default_rng(seed).integers(1, 255, rank.memory.shape, np.uint8)


def same(p, d, sources, targets, heads=(0, 1)):
    return all((p.block(s, h) == d.block(t, h)).all() for s, t in zip(sources, targets, strict=True) for h in heads)
