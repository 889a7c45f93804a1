"""Cells of the failure matrix between two real processes: NIXL over TCP, ZMQ, a thread each; killed, stopped, cut off.

WRITEs stay in flight because TCP moves bytes only while their target drives its agent; one that is stopped doesn't.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from nixl_pair import BIG, TOKENS, Pair, may_copy_between_processes
from nixl_tier import BLOCK, BLOCKS, Child

from kvferry.transfer import commands as cmd

pytest.importorskip("nixl_cu12")
pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
Start = Callable[..., Pair]

LIMITS = {"lease_s": 2.0, "connect_timeout_s": 1.5, "registration_timeout_s": 2.0, "staging": "off"}
SOON_S = 2.0  # 'at once', on a busy machine
KINDS = ("sources", "landings", "posts", "stages")
ALL, ALL_TOKENS = tuple(range(BLOCKS)), BLOCKS * BLOCK


def ends(child: Child, code: str | set[str], since: float, least: float = 0.0, most: float = SOON_S) -> None:
    """Its next word is this end, so long after."""
    got: list[Any] = child.ask("results", 1, most + 5.0)
    took = time.monotonic() - since
    codes = {code} if isinstance(code, str) else code
    assert got and got[0].code in codes, got
    assert least - 0.1 <= took <= most, f"{code} after {took:.2f} s"
    if isinstance(got[0], cmd.Failing):
        rest = got[1:] or child.ask("results", 1, 5.0)
        assert [(one.code, type(one)) for one in rest] == [(got[0].code, cmd.Received)]
    child.ask("open")


def in_flight(pair: Pair, tid: str) -> None:
    """WRITEs that don't complete: D is stopped."""
    pair.expect(tid)
    pair.land(tid, ALL, ALL_TOKENS)
    pair.until(pair.p, "legs", lambda legs: legs == 1)
    pair.stop(pair.d)
    if pair.mode == "stream":
        pair.grown(tid, ALL[:-1], ALL_TOKENS - BLOCK)
    else:
        pair.ready(tid, ALL, ALL_TOKENS)
    pair.until(pair.p, "open", lambda held: held["posts"] == 1)


def test_killed(start: Start) -> None:
    """P, then D, at each stage; whoever died is started again at the same address, and the pair works."""
    pair = start("push", token_bytes=BIG, **LIMITS)
    d = pair.d

    pair.kill(pair.p)  # before registration
    pair.until(d, "ups", lambda ups: ups == 0)
    since = time.monotonic()
    pair.land("before", (1, 2), TOKENS)
    ends(d, "peer_unreachable", since, LIMITS["connect_timeout_s"], LIMITS["connect_timeout_s"] + SOON_S)
    pair.restart("p")

    pair.expect("registered")
    pair.land("registered", (1, 2), TOKENS)
    pair.until(pair.p, "legs", lambda legs: legs == 1)
    ends(d, "peer_gone", pair.kill(pair.p))
    pair.restart("p")

    in_flight(pair, "flying")
    since = pair.kill(pair.p)
    pair.go_on(pair.d)
    ends(d, "peer_gone", since)
    pair.nothing_held(d)
    pair.restart("p")

    pair.works("decoding")
    pair.kill(pair.p)
    assert d.ask("results", 1, 0.5) == []
    pair.restart("p")

    p = pair.p
    pair.expect("d-before")
    pair.kill(pair.d)
    pair.ready("d-before", (1, 2), TOKENS)
    ends(p, "lease_lapsed", time.monotonic(), LIMITS["lease_s"] - 0.2, LIMITS["lease_s"] + 1.0)
    pair.restart("d")

    pair.expect("d-registered")
    pair.land("d-registered", (1, 2), TOKENS)
    pair.until(p, "legs", lambda legs: legs == 1)
    pair.kill(pair.d)
    pair.until(p, "legs", lambda legs: legs == 0)
    since = time.monotonic()
    pair.ready("d-registered", (1, 2), TOKENS)
    ends(p, "peer_gone", since)
    pair.restart("d")

    in_flight(pair, "d-flying")
    since = pair.kill(pair.d)
    ends(p, {"peer_gone", "write_failed"}, since)  # whoever says it first, ZMQ or NIXL
    pair.until(p, "open", lambda held: held["posts"] == 0)
    pair.nothing_held(p)
    pair.restart("d")

    pair.works("d-decoding")
    pair.kill(pair.d)
    assert p.ask("results", 1, 0.5) == []
    pair.restart("d")
    pair.works("the end")
    pair.nothing_held(pair.p, pair.d)


@pytest.mark.parametrize("pause_s", [0.0, 0.004])
def test_killed_while_slots_go_to_and_fro(start: Start, pause_s: float) -> None:
    """Staged: WRITEs with notes one way, notes the other, cut anywhere; who lives serves the next."""
    staged = LIMITS | {"staging": "always", "staging_bytes": 1 << 16}
    pair = start("push", token_bytes=BIG, **staged)
    for number in range(2):
        for side in ("p", "d"):
            tid = f"{side}{number}"
            pair.expect(tid)
            pair.land(tid, ALL, ALL_TOKENS)
            pair.until(pair.p, "legs", lambda legs: legs == 1)
            pair.ready(tid, ALL, ALL_TOKENS)
            time.sleep(pause_s)
            left = pair.d if side == "p" else pair.p
            since = pair.kill(pair.p if side == "p" else pair.d)
            got = left.ask("results", 1, 30.0)
            assert got and time.monotonic() - since < SOON_S + LIMITS["lease_s"]
            assert {one.code for one in got} <= {"", "peer_gone", "write_failed"}, got
            pair.until(left, "open", lambda held: not any(held[kind] for kind in KINDS))
            left.ask("results", 2, 0.1)
            pair.restart(side)
            pair.works(f"then-{tid}")


def test_killed_in_the_middle_of_a_stream(start: Start) -> None:
    pair = start("stream", token_bytes=BIG, stream_chunk_bytes=1, **LIMITS)
    in_flight(pair, "flying")
    since = pair.kill(pair.p)
    pair.go_on(pair.d)
    ends(pair.d, "peer_gone", since)
    pair.nothing_held(pair.d)
    pair.restart("p")

    in_flight(pair, "d-flying")
    pair.kill(pair.d)
    pair.until(pair.p, "legs", lambda legs: legs == 0)
    since = time.monotonic()
    pair.ready("d-flying", ALL, ALL_TOKENS)
    ends(pair.p, {"peer_gone", "write_failed"}, since)
    pair.until(pair.p, "open", lambda held: held["posts"] == 0)
    pair.nothing_held(pair.p)
    pair.restart("d")
    pair.works("the end")


def test_killed_while_reads_are_in_flight(start: Start) -> None:
    """Pull by READ: P is stopped when it has granted, so that D's READ of its memory hangs, and killed."""
    pair = start("pull", relay=True, token_bytes=BIG, pull_by="read", **LIMITS)
    relay = pair.relay
    assert relay is not None

    def reading(tid: str) -> None:
        pair.expect(tid)
        pair.ready(tid, ALL, ALL_TOKENS)
        relay.delay_s = 0.5  # the grant is on its way when P is stopped
        pair.land(tid, ALL, ALL_TOKENS)
        pair.until(pair.p, "legs", lambda legs: legs == 1)
        pair.stop(pair.p)
        relay.delay_s = 0.0
        pair.until(pair.d, "open", lambda held: held["posts"] == 1)

    reading("flying")
    ends(pair.d, {"peer_gone", "read_failed"}, pair.kill(pair.p))  # whoever says it first, ZMQ or NIXL
    pair.nothing_held(pair.d)
    pair.restart("p")
    pair.works("after p")
    pair.nothing_held(pair.p, pair.d)


def test_killed_in_the_middle_of_a_pull(start: Start) -> None:
    """Over TCP, where READs are emulated, P writes; else UCX would end P when D dies while it reads."""
    pair = start("pull", token_bytes=BIG, **LIMITS)

    def pulling(tid: str) -> None:
        pair.works(f"first, then {tid}")
        pair.until(pair.p, "ways", lambda ways: ways == ["write"])
        pair.expect(tid)
        pair.ready(tid, ALL, ALL_TOKENS)
        pair.land(tid, ALL, ALL_TOKENS)
        pair.until(pair.p, "open", lambda held: held["posts"] == 1)

    p = pair.p
    for turn in range(4):
        pulling(f"d-flying-{turn}")
        ends(p, {"peer_gone", "write_failed"}, pair.kill(pair.d))  # whoever says it first, ZMQ or NIXL
        pair.until(p, "open", lambda held: held["posts"] == 0)
        pair.nothing_held(p)
        pair.restart("d")
    assert pair.p is p and p.process.is_alive()

    pulling("flying")
    ends(pair.d, "peer_gone", pair.kill(pair.p))
    pair.nothing_held(pair.d)
    pair.restart("p")
    pair.works("the end")
    pair.nothing_held(pair.p, pair.d)


@pytest.mark.skipif(not may_copy_between_processes(), reason="process_vm_readv is not allowed here")
def test_killed_while_it_reads_within_the_machine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy within the machine needs nobody's help: D reads, and may die in the middle of it, as may P."""
    monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
    pair = start("pull", token_bytes=BIG, **LIMITS)
    p = pair.p
    for turn in range(3):
        pair.works(f"first, then {turn}")
        pair.until(p, "ways", lambda ways: ways == ["read"])
        tid = f"d-reads-{turn}"
        pair.expect(tid)
        pair.ready(tid, ALL, ALL_TOKENS)
        pair.land(tid, ALL, ALL_TOKENS)
        time.sleep(0.003 + turn * 0.003)  # it takes some 10 ms
        ends(p, {"peer_gone", "", "lease_lapsed"}, pair.kill(pair.d), most=4.0)  # or before it asks
        pair.nothing_held(p)
        pair.restart("d")
    assert pair.p is p and p.process.is_alive()

    pair.works("before P dies")
    pair.until(p, "ways", lambda ways: ways == ["read"])
    pair.expect("flying")
    pair.ready("flying", ALL, ALL_TOKENS)
    pair.land("flying", ALL, ALL_TOKENS)
    ends(pair.d, {"peer_gone", "read_failed", ""}, pair.kill(p))
    pair.nothing_held(pair.d)
    pair.restart("p")
    pair.works("the end")
    pair.nothing_held(pair.p, pair.d)


def test_stopped(start: Start) -> None:
    """C43: a stopped P fails D's request at the end of a lease, keeps its blocks until it goes on, and reaches none
    that went back; a stopped D is cut off, and greeted anew."""
    pair = start("push", token_bytes=BIG, **LIMITS)

    pair.expect("registered")
    pair.land("registered", (1, 2), TOKENS)
    pair.until(pair.p, "legs", lambda legs: legs == 1)
    since = pair.stop(pair.p)
    (failing,) = pair.d.ask("results", 1, 6.0)
    assert isinstance(failing, cmd.Failing) and failing.code == "peer_gone"
    assert 1.0 < time.monotonic() - since < LIMITS["lease_s"] + 1.0
    assert pair.d.ask("results", 1, 1.0) == [], "P may still write to them"
    pair.go_on(pair.p)
    (received,) = pair.d.ask("results", 1, 5.0)
    assert isinstance(received, cmd.Received) and received.code == "peer_gone"
    pair.ready("registered", (5, 6), TOKENS)
    assert [one.ok for one in pair.p.ask("results", 1, 5.0)] == [False]

    in_flight(pair, "flying")
    pair.stop(pair.p)
    pair.go_on(pair.d)
    (failing,) = pair.d.ask("results", 1, 6.0)
    assert isinstance(failing, cmd.Failing) and failing.code == "peer_gone"
    pair.go_on(pair.p)
    (received,) = pair.d.ask("results", 1, 5.0)
    assert isinstance(received, cmd.Received) and not received.ok
    pair.d.ask("paint", 0xEE)
    assert [one.ok for one in pair.p.ask("results", 1, 5.0)] == [False]
    assert pair.d.ask("results", 1, 0.5) == [] and pair.d.ask("is painted", 0xEE), "written to after it went back"
    pair.d.ask("up", 1)
    pair.works("after")

    in_flight(pair, "d-stopped")
    since = time.monotonic()
    (sent,) = pair.p.ask("results", 1, 6.0)
    assert sent.code == "peer_gone" and time.monotonic() - since < LIMITS["lease_s"] + 1.0
    held = pair.p.ask("open")
    assert (held["sources"], held["posts"]) == (0, 1), "a posted WRITE can't be called back"
    pair.go_on(pair.d)
    assert [one.code for one in pair.d.ask("results", 2, 5.0)] == ["peer_gone"] * 2
    pair.d.ask("up", 1)
    pair.works("the end")
    pair.nothing_held(pair.p, pair.d)


def test_a_stopped_writer_that_holds_too_much_is_cut_off_and_reaches_nothing(start: Start) -> None:
    """All of D's blocks wait for a P that is stopped in the middle of its WRITE. They are free two leases later, and
    what P does when it goes on lands in none of them."""
    pair = start("push", token_bytes=BIG, quarantine_share=0.5, **LIMITS)
    for turn in range(3):
        tid = f"t{turn}"
        in_flight(pair, tid)
        since = pair.stop(pair.p)
        pair.go_on(pair.d)
        failing, received = pair.d.ask("results", 2, 8.0)
        assert isinstance(failing, cmd.Failing) and isinstance(received, cmd.Received)
        assert failing.code == received.code == "peer_gone"
        assert 2 * LIMITS["lease_s"] - 0.5 < time.monotonic() - since < 2 * LIMITS["lease_s"] + 2.0
        pair.d.ask("paint", 0xEE)
        pair.go_on(pair.p)
        assert [one.ok for one in pair.p.ask("results", 1, 5.0)] == [False]
        assert pair.d.ask("results", 1, 0.5) == [] and pair.d.ask("is painted", 0xEE), "written to after it went back"
        pair.d.ask("up", 1)
        pair.works(f"after-{turn}")


def test_connection_cut_while_writes_are_in_flight(start: Start) -> None:
    """Both live, only their side channel breaks: the WRITE can't be called back, so D's blocks wait for its end."""
    pair = start("push", relay=True, token_bytes=BIG)
    assert pair.relay is not None
    in_flight(pair, "flying")
    pair.relay.cut()
    assert [one.code for one in pair.p.ask("results", 1, 5.0)] == ["peer_gone"]
    pair.go_on(pair.d)
    failing, received = pair.d.ask("results", 2, 10.0)
    assert isinstance(failing, cmd.Failing) and isinstance(received, cmd.Received) and received.code == "peer_gone"
    pair.d.ask("paint", 0xEE)
    pair.d.ask("up", 1)
    pair.expect("next")
    pair.land("next", (1, 2), TOKENS)
    pair.ready("next", (5, 6), TOKENS)
    assert [one.ok for one in pair.d.ask("results", 1, 10.0) + pair.p.ask("results", 1, 10.0)] == [True, True]
    others = tuple(block for block in range(BLOCKS) if block not in (1, 2))
    assert set(pair.d.ask("blocks", others)) == {0xEE}, "written to after it went back"
    pair.nothing_held(pair.p, pair.d)


def test_a_side_channel_that_is_slow_or_blocked(start: Start) -> None:
    pair = start("push", relay=True, **LIMITS)
    relay = pair.relay
    assert relay is not None

    relay.delay_s = 0.2
    pair.works("slow")
    relay.delay_s = 0.0

    pair.expect("registered")
    pair.land("registered", (1, 2), TOKENS)
    pair.until(pair.p, "legs", lambda legs: legs == 1)
    relay.blocked, since = True, time.monotonic()
    (failing,) = pair.d.ask("results", 1, 6.0)
    assert failing.code == "peer_gone" and time.monotonic() - since < LIMITS["lease_s"] + 1.0
    pair.until(pair.p, "legs", lambda legs: legs == 0)
    pair.ready("registered", (5, 6), TOKENS)
    assert [one.code for one in pair.p.ask("results", 1, 5.0)] == ["peer_gone"]
    assert pair.d.ask("results", 1, 0.5) == [], "P may still write to them, for all that D knows"
    relay.blocked = False
    (received,) = pair.d.ask("results", 1, 5.0)
    assert isinstance(received, cmd.Received) and received.code == "peer_gone"
    pair.d.ask("up", 1)
    pair.works("again")

    relay.blocked = True  # the handshake: P starts anew, and D's greeting doesn't pass
    pair.kill(pair.p)
    pair.p = pair.start_p()
    assert pair.p.receive() == "ready"
    relay.blocked = False
    pair.d.ask("up", 1)
    pair.works("the end")
    pair.nothing_held(pair.p, pair.d)
