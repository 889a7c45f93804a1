"""Two real processes: NIXL, ZMQ, the transfer thread; killed for real."""

from __future__ import annotations

import random
import time

import pytest
from nixl_pair import shm, start
from nixl_tier import BLOCK, BLOCKS, Child, liar_child

from kvferry.transfer import commands as cmd

pytest.importorskip("nixl_cu12")
pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]
__all__ = ["shm", "start"]


@pytest.mark.parametrize(
    ("mode", "config"), [("push", {}), ("pull", {}), ("push", {"staging": "always", "staging_bytes": 1 << 16})]
)
def test_random_transfers_are_byte_exact_and_waiting_costs_nothing(start, mode, config):
    pair = start(mode, **config)
    rng = random.Random(7)
    for i in range(25):
        count = rng.randint(1, 12)
        tokens = count * BLOCK - rng.randint(0, BLOCK - 1)
        sources, targets = (tuple(rng.sample(range(BLOCKS), count)) for _ in range(2))
        pair.p.ask("fill", i)
        steps = [
            lambda i=i, b=targets, n=tokens: pair.land(f"t{i}", b, n),
            lambda i=i, b=sources, n=tokens: (pair.expect(f"t{i}"), pair.ready(f"t{i}", b, n)),
        ]
        rng.shuffle(steps)
        for step in steps:
            step()
        ends = [pair.d.ask("results", 1, 10.0), pair.p.ask("results", 1, 10.0)]
        assert [[one.ok for one in end] for end in ends] == [[True], [True]], ends
        assert pair.d.ask("blocks", targets) == pair.p.ask("blocks", sources)
    pair.nothing_held(pair.p, pair.d)

    pair.land("waits", (1, 2), 2 * BLOCK)
    pair.p.send("cpu", 2.0)
    pair.d.send("cpu", 2.0)
    assert pair.p.receive() < 0.1 and pair.d.receive() < 0.1, "a core is kept busy while nothing happens"
    pair.expect("waits")
    pair.ready("waits", (3, 4), 2 * BLOCK)
    assert pair.d.ask("results", 1, 10.0)[0].ok


def test_killed_p_is_told_within_two_seconds_and_may_come_back(start):
    pair = start("push")
    pair.land("t", (1, 2), 2 * BLOCK)
    pair.expect("t")
    pair.d.ask("open")
    pair.p.process.kill()
    killed = time.monotonic()
    (result,) = pair.d.ask("results", 1, 5.0)
    assert time.monotonic() - killed < 2.0
    assert isinstance(result, cmd.Failing) and result.code == "peer_gone"
    (result,) = pair.d.ask("results", 1, 5.0)
    assert not result.ok and result.code == "peer_gone"
    pair.nothing_held(pair.d)
    pair.p.process.join()
    pair.p = pair.start_p()
    assert pair.p.receive() == "ready"
    pair.d.ask("up", 1)
    pair.p.ask("fill", 3)
    pair.land("again", (1, 2), 2 * BLOCK)
    pair.expect("again")
    pair.ready("again", (5, 6), 2 * BLOCK)
    assert pair.d.ask("results", 1, 10.0)[0].ok and pair.p.ask("results", 1, 10.0)[0].ok
    assert pair.d.ask("blocks", (1, 2)) == pair.p.ask("blocks", (5, 6))


def test_killed_d_frees_the_source_by_its_lease(start):
    """C39, C53."""
    pair = start("push", lease_s=2.0)
    pair.expect("t")
    pair.p.ask("open")
    pair.d.process.kill()
    pair.d.process.join()
    pair.ready("t", (1, 2), 2 * BLOCK)
    began = time.monotonic()
    (result,) = pair.p.ask("results", 1, 10.0)
    assert 1.5 < time.monotonic() - began < 3.0
    assert (result.ok, result.code) == (False, "lease_lapsed")
    pair.nothing_held(pair.p)
    assert pair.p.ask("open")["peers"] == 0


@pytest.mark.parametrize("what", ["memory that it has not registered", "the agent of another"])
def test_a_registration_names_only_memory_of_its_own_engine(start, what):
    """One that has the key, and lies: P refuses it, writes nothing, and goes on serving D over the same NIXL agent."""
    pair = start("push", lease_s=2.0)
    pair.d.ask("fill", 3)
    theirs = pair.d.ask("blocks", range(BLOCKS))
    liar = Child(liar_child, pair.p_port, pair.d_port, what)
    try:
        assert liar.receive() == "said"
        pair.expect("stolen")
        pair.ready("stolen", (1, 2), 2 * BLOCK)
        (sent,) = pair.p.ask("results", 1, 10.0)
        heard = liar.ask("heard")
        assert not sent.ok and sent.code == ("write_failed" if "memory" in what else "lease_lapsed")
        assert heard[-1] == "Refuse" or "Landed" not in heard
    finally:
        liar.stop()
    assert pair.d.ask("blocks", range(BLOCKS)) == theirs
    pair.p.ask("fill", 4)
    pair.land("t", (5, 6), 2 * BLOCK)
    pair.expect("t")
    pair.ready("t", (1, 2), 2 * BLOCK)
    (received,) = pair.d.ask("results", 1, 20.0)
    assert received.ok and pair.d.ask("blocks", (5, 6)) == pair.p.ask("blocks", (1, 2))
    assert pair.p.ask("results", 1, 10.0)[0].ok
    pair.nothing_held(pair.p, pair.d)
