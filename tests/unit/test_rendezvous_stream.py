"""Mode `stream` on the prefill side: every order of registration, chunks, seal, preemption and ends, as examples."""

from __future__ import annotations

import functools

import pytest
import rendezvous_parts
from rendezvous_parts import BLOCKS, acts, failed, gone, machine

from kvferry.protocol.instructions import Release, Rewound, Send, StartWrite, Tell
from kvferry.protocol.messages import Begin, Landed, Reached, Seal
from kvferry.protocol.rendezvous import Rendezvous
from kvferry.protocol.stream import Pace, Span

BEGUN = Send("d", Begin(reg_id=1, sealed=False))


reg = functools.partial(rendezvous_parts.reg, mode="stream")


@pytest.fixture
def p():
    return machine()


def sealed(reg_id=1, end=40, attempt=0, peer="d"):
    return Send(peer, Seal(reg_id=reg_id, end_token=end, attempt=attempt))


def landed(nbytes, descriptors=1, reg_id=1, peer="d"):
    return Send(peer, Landed(reg_id=reg_id, nbytes=nbytes, descriptors=descriptors))


def write(start, end, blocks=BLOCKS, register=None, peer="d"):
    return StartWrite(peer, register or reg(), blocks, Span(start, end))


def wrote(p, peer="d", reg_id=1, nbytes=10):
    return acts(p.wrote(peer, reg_id, 1.0, nbytes=nbytes, descriptors=1))


def streaming(p, fan_out=1):
    """A source of 40 tokens, a registration, and the first 16 tokens on their way."""
    p.expect("t", "stream", fan_out, 0.0, 40)
    assert acts(p.register("d", reg(), 0.0)) == []
    assert acts(p.grown("t", (4,), 16, 0.0)) == [BEGUN, write(0, 16, (4,))]
    return p


@pytest.mark.parametrize("when", ["expect", "grown 1", "grown 2", "ready", "end"])
def test_a_registration_takes_what_is_there_whenever_it_comes(p, when):
    steps = {
        "expect": lambda: p.expect("t", "stream", 1, 0.0, 40),
        "grown 1": lambda: p.grown("t", (4,), 16, 0.0),
        "grown 2": lambda: p.grown("t", (5,), 32, 0.0),
        "ready": lambda: p.ready("t", BLOCKS, 40, 0.0),
        "end": lambda: [],
    }
    out = []
    for name, step in steps.items():
        if name == when:
            out += acts(p.register("d", reg(), 0.0))
        out += acts(step())
    spans = [one.span for one in out if isinstance(one, StartWrite)]
    assert [span.start_token for span in spans] == [0, *(span.end_token for span in spans[:-1])]
    assert spans[-1].end_token == 40
    assert len(spans) == {"expect": 3, "grown 1": 3, "grown 2": 3, "ready": 2, "end": 1}[when]
    assert out[0] == BEGUN and out.count(sealed()) == 1
    for _ in spans[1:]:
        assert wrote(p) == []
    assert wrote(p) == [landed(10 * len(spans), len(spans)), Release("t", True, "", "")] and gone(p)


def test_a_chunk_is_written_from_the_blocks_known_so_far_and_the_seal_follows_the_last(p):
    streaming(p)
    assert acts(p.grown("t", (5,), 32, 0.0)) == [write(16, 32, (4, 5))]
    assert acts(p.grown("t", (), 32, 0.0)) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [write(32, 40), sealed()]
    assert p.tick(99.0) == [], "no lease while WRITEs are under way"


def test_a_chunk_that_ends_before_the_next_one_is_there_ends_nothing(p):
    streaming(p)
    assert wrote(p) == [] and p.tick(99.0) == [] and p.open_count() == 1
    assert acts(p.ready("t", BLOCKS, 40, 100.0)) == [write(16, 40), sealed()]
    assert wrote(p) == [landed(20, 2), Release("t", True, "", "")] and gone(p)


def test_all_written_before_it_is_sealed(p):
    streaming(p)
    p.grown("t", (5, 6), 40, 0.0)
    assert wrote(p) == wrote(p) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [sealed(), landed(20, 2), Release("t", True, "", "")] and gone(p)


def test_planes_of_a_step_under_way_leave_before_its_rest(p):
    p.expect("t", "stream", 1, 0.0, 40)
    p.register("d", reg(), 0.0)
    register = reg()
    part = StartWrite("d", register, BLOCKS, Span(0, 40, 0, 3))
    assert acts(p.grown("t", BLOCKS, 40, 0.0, planes=3)) == [BEGUN, part]
    rest = StartWrite("d", register, BLOCKS, Span(0, 40, 3))
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [rest, sealed()]


def test_a_registration_that_needs_nothing_waits_for_the_end(p):
    p.expect("t", "stream", 1, 0.0, 40)
    nothing = reg(start=40, end=40, blocks=())
    assert acts(p.register("d", nothing, 0.0)) == acts(p.grown("t", (4,), 16, 0.0)) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [landed(0, 0), Release("t", True, "", "")] and gone(p)


def test_a_late_taker_gets_the_backlog_in_pieces_beside_the_first(p):
    streaming(p, fan_out=2)
    p.grown("t", (5,), 32, 0.0)
    late = reg(2, start=8)
    pieces = [write(8, 16, (4, 5), late, "e"), write(16, 32, (4, 5), late, "e")]  # at whole blocks of 16
    assert acts(p.register("e", late, 0.0, Pace(16, 1, 16)))[1:] == pieces
    p.ready("t", BLOCKS, 40, 0.0)
    for _ in range(3):
        done = wrote(p)
    assert done == [landed(30, 3)], "the other taker's WRITEs hold the source"
    for _ in range(3):
        done = wrote(p, "e", 2)
    assert done == [landed(30, 3, 2, "e"), Release("t", True, "", "")] and gone(p)


# -- back-pressure


def test_chunks_that_wait_for_a_slow_peer_become_one():
    p = Rendezvous(lease_s=2.0, unseen_s=2.0, max_flying=2)
    p.expect("t", "stream", 1, 0.0, 40)
    p.register("d", reg(), 0.0)
    counts = [len(acts(p.grown("t", (4,) if not i else (), 8 * (i + 1), 0.0))) for i in range(4)]
    assert counts == [2, 1, 0, 0], "Begin and a WRITE, a WRITE, no more"
    assert wrote(p) == [write(16, 32, (4,))]
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [sealed()], "D may know that prefill is done"
    assert wrote(p) == [write(32, 40)] and wrote(p) == []
    assert wrote(p) == [landed(40, 4), Release("t", True, "", "")] and gone(p)


def test_no_more_is_in_flight_than_the_peer_last_said_it_takes():
    p = Rendezvous(lease_s=2.0, unseen_s=2.0, max_flying=3)
    p.expect("t", "stream", 1, 0.0, 40)
    p.expect("u", "stream", 1, 0.0, 40)
    p.register("d", reg(credit=2), 0.0)
    counts = [len(acts(p.grown("t", (4,) if not i else (), 8 * (i + 1), 0.0))) for i in range(3)]
    assert counts == [2, 1, 0], "Begin and a WRITE, a WRITE, no more"
    p.register("d", reg(2, "u", credit=1), 0.0)
    assert wrote(p) == [], "one is in flight still"
    assert wrote(p) == [write(16, 24, (4,), reg(credit=2))]
    assert p.register("e", reg(3, "u", credit=9), 0.0) and acts(p.peer_gone("d", "x", 0.0)) == []
    assert p._credit == {"e": 9}


def test_transfers_to_one_peer_share_its_limit_and_other_peers_have_their_own():
    p = Rendezvous(lease_s=2.0, unseen_s=2.0, max_flying=1)
    for number, (tid, peer) in enumerate((("t", "d"), ("u", "d"), ("v", "e")), 1):
        p.expect(tid, "stream", 1, 0.0, 40)
        p.register(peer, reg(number, tid), 0.0)
    assert len(acts(p.grown("t", (4,), 16, 0.0))) == 2
    assert acts(p.grown("u", (5,), 16, 0.0)) == []
    assert len(acts(p.grown("v", (6,), 16, 0.0))) == 2
    assert wrote(p, "e", 3) == []
    second = reg(2, "u")
    begun = Send("d", Begin(reg_id=2, sealed=False))
    assert wrote(p) == [begun, write(0, 16, (5,), second)]


# -- preempted


def test_rewind_waits_for_what_is_written_and_begins_anew(p):
    streaming(p)
    p.grown("t", (5,), 32, 0.0)
    assert acts(p.rewind("t", 0.0)) == [] and wrote(p) == []
    assert wrote(p) == [Rewound("t")]
    assert acts(p.grown("t", (9,), 16, 0.0)) == [write(0, 16, (9,))], "no second Begin"
    assert acts(p.ready("t", (9, 10, 11), 40, 0.0)) == [write(16, 40, (9, 10, 11)), sealed(attempt=1)]
    assert wrote(p) == []
    assert wrote(p) == [landed(20, 2), Release("t", True, "", "")], "what went before does not count"
    assert gone(p)


@pytest.mark.parametrize("how", ["nobody came", "nothing flies", "not here"])
def test_rewind_is_answered_at_once_where_nothing_reads_the_blocks(p, how):
    if how == "nobody came":
        p.expect("t", "stream", 1, 0.0, 40)
        p.grown("t", (4,), 16, 0.0)
    elif how == "nothing flies":
        wrote(streaming(p))
    assert acts(p.rewind("t", 0.0)) == [Rewound("t")]
    if how == "nobody came":
        p.grown("t", (9,), 16, 0.0)
        assert acts(p.register("d", reg(), 0.0)) == [BEGUN, write(0, 16, (9,))]


def test_rewound_twice_only_the_last_attempt_counts(p):
    streaming(p)
    for attempt in (1, 2):
        p.rewind("t", 0.0)
        assert wrote(p) == [Rewound("t")]
        assert acts(p.grown("t", (9,), 16, 0.0)) == [write(0, 16, (9,))], attempt
    p.ready("t", (9, 10, 11), 40, 0.0)
    wrote(p)
    assert wrote(p) == [landed(20, 2), Release("t", True, "", "")]


def test_a_registration_that_comes_while_old_writes_end_gets_the_new_attempt(p):
    streaming(p, fan_out=2)
    p.rewind("t", 0.0)
    assert acts(p.register("e", reg(2), 0.0)) == []
    assert wrote(p) == [Rewound("t")]
    out = acts(p.ready("t", BLOCKS, 40, 0.0))
    second = reg(2)
    assert [one for one in out if isinstance(one, StartWrite)] == [write(0, 40), write(0, 40, BLOCKS, second, "e")]


def test_a_write_of_the_old_attempt_fails(p):
    streaming(p)
    p.rewind("t", 0.0)
    assert acts(p.write_failed("d", 1, "broken", 0.0)) == [Send("d", failed(1, "write_failed", "broken")), Rewound("t")]
    assert acts(p.grown("t", (9,), 16, 0.0)) == []
    assert acts(p.ready("t", (9, 10, 11), 40, 0.0)) == [Release("t", False, "write_failed", "broken")] and gone(p)


def test_aborted_while_the_old_attempts_write_ends(p):
    streaming(p)
    p.rewind("t", 0.0)
    assert acts(p.abort("t", "aborted", "client left", 0.0)) == []
    told = [Send("d", failed(1, "aborted", "client left")), Rewound("t")]
    assert wrote(p) == told and gone(p), "the engine has its blocks already: no Release"


# -- ended in its middle


@pytest.mark.parametrize("flying", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_abort_waits_for_the_chunk_and_gives_the_blocks_back(p, flying, held):
    """`held` False is the router's `Abandon`: P's engine computes on, and its blocks are its own again."""
    streaming(p)
    if not flying:
        wrote(p)
    out = acts(p.abort("t", "aborted", "client left", 0.0, held))
    if flying:
        assert out == [] and acts(p.grown("t", (5,), 32, 0.0)) == []
        out = wrote(p)
    assert out == [Send("d", failed(1, "aborted", "client left")), Release("t", False, "aborted", "client left")]
    assert gone(p) and acts(p.grown("t", (5,), 32, 0.0)) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [Release("t", False, "aborted", "client left")]


def test_abort_of_what_has_ended_still_gives_the_blocks_back(p):
    streaming(p)
    p.abort("t", "abandoned", "router", 0.0)
    wrote(p)
    assert acts(p.abort("t", "aborted", "engine", 0.0, held=True)) == [Release("t", False, "aborted", "engine")]
    assert acts(p.abort("t", "aborted", "engine", 0.0)) == [] and gone(p)


@pytest.mark.parametrize("flying", [True, False])
def test_cancel_ends_the_leg_and_the_source_ends_with_its_prompt(p, flying):
    streaming(p)
    if not flying:
        wrote(p)
    out = acts(p.cancel("d", 1, "client left", 0.0))
    if flying:
        assert out == []
        out = wrote(p)
    assert out == [Send("d", failed(1, "cancelled", "client left"))]
    assert acts(p.grown("t", (5,), 32, 0.0)) == [] and p.open_count() == 1
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [Release("t", False, "cancelled", "client left")] and gone(p)


def test_registered_again_after_a_cancel_it_is_written_from_the_start(p):
    streaming(p)
    p.cancel("d", 1, "aborted there", 0.0)
    second = reg(2)
    assert acts(p.register("d", second, 0.0)) == [Send("d", Begin(reg_id=2, sealed=False)), write(0, 16, (4,), second)]
    assert acts(p.register("d", second, 0.0)) == acts(p.register("d", reg(), 0.0)) == []
    assert wrote(p) == [Send("d", failed(1, "cancelled", "aborted there"))]
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [write(16, 40, BLOCKS, second), sealed(2)]
    wrote(p, reg_id=2)
    assert wrote(p, reg_id=2)[0] == landed(20, 2, 2) and gone(p)


@pytest.mark.parametrize("order", ["write first", "peer first"])
def test_a_taker_that_is_gone_leaves_the_other_alone(p, order):
    streaming(p, fan_out=2)
    p.register("e", reg(2), 0.0)
    events = [lambda: p.write_failed("d", 1, "lost", 0.0), lambda: p.peer_gone("d", "lost", 0.0)]
    out = [one for event in (events if order == "write first" else events[::-1]) for one in acts(event())]
    told = [] if order == "peer first" else [Send("d", failed(1, "write_failed", "lost"))]
    assert [one for one in out if isinstance(one, Send)] == told and not any(isinstance(one, Release) for one in out)
    second = reg(2)
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [write(16, 40, BLOCKS, second, "e"), sealed(2, peer="e")]
    wrote(p, "e", 2)
    done = wrote(p, "e", 2)
    assert done[0] == landed(20, 2, 2, "e") and isinstance(done[1], Release) and not done[1].ok and gone(p)


def test_c42_a_chunk_that_failed_is_told_when_its_siblings_have_ended(p):
    streaming(p)
    p.grown("t", (5,), 32, 0.0)
    assert acts(p.write_failed("d", 1, "flap", 0.0)) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [], "nothing more is written"
    assert wrote(p) == [Send("d", failed(1, "write_failed", "flap")), Release("t", False, "write_failed", "flap")]
    assert gone(p)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_stream_that_decode_takes_for_something_else(p, mode):
    p.expect("t", "stream", 1, 0.0, 40)
    p.grown("t", (4,), 16, 0.0)
    (answer,) = acts(p.register("d", reg(mode=mode), 0.0))
    assert answer.message.code == "mode_mismatch" and "'stream'" in answer.message.reason
    assert [type(one) for one in acts(p.ready("t", BLOCKS, 40, 0.0))] == [Release] and gone(p)


def test_decode_wants_more_than_the_prompt_has(p):
    p.expect("t", "stream", 1, 0.0, 40)
    p.register("d", reg(end=41), 0.0)
    p.grown("t", (4,), 16, 0.0)
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == []
    told, release = wrote(p)
    assert told.message.code == release.code == "prompt_mismatch" and gone(p)


# -- how far a prompt is


def reached(tokens, of=40, ended=False, asker="r"):
    return Tell(asker, Reached(transfer_id="t", tokens=tokens, of=of, ended=ended))


def test_who_watches_before_the_request_came_is_told_in_its_middle(p):
    assert p.watch("r", "t", 50, 0.0) == p.watch("s", "t", 90, 0.0) == []
    assert acts(p.expect("t", "stream", 1, 1.0, 40)) == acts(p.grown("t", (4,), 16, 1.0)) == []
    assert acts(p.grown("t", (5,), 32, 1.0)) == [reached(32)]
    assert acts(p.ready("t", BLOCKS, 40, 1.0)) == [reached(40, asker="s")], "each once, by its own percentage"
    assert p.next_due() == 3.0, "the lease of a source that waits for a registration"


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
def test_who_watches_later_is_told_at_once(p, mode):
    p.expect("t", mode, 1, 0.0, 40)
    assert p.watch("r", "t", 60, 0.0) == []
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [reached(40)]
    assert p.watch("r", "t", 100, 0.0) == [reached(40)]
    p.abort("t", "abandoned", "nobody wants it", 0.0)
    assert p.watch("r", "t", 10, 0.0) == [reached(0, 0, ended=True)]


def test_preempted_it_has_not_reached_that_any_more(p):
    p.expect("t", "stream", 1, 0.0, 40)
    p.grown("t", (4,), 16, 0.0)
    p.watch("r", "t", 50, 0.0)
    p.rewind("t", 0.0)
    assert acts(p.grown("t", (9,), 16, 0.0)) == []
    assert acts(p.grown("t", (10,), 20, 0.0)) == [reached(20)]


def test_who_watches_learns_of_the_end(p):
    streaming(p)
    p.watch("r", "t", 80, 0.0)
    assert acts(p.abort("t", "aborted", "client left", 0.0)) == [], "its WRITE has not ended"
    assert wrote(p)[-1] == reached(16, ended=True) and gone(p)


def test_a_watched_request_that_never_comes(p):
    p.watch("r", "t", 50, 1.0)
    assert p.next_due() == 3.0 and p.tick(3.0) == [reached(0, 0, ended=True)] and gone(p)
    assert acts(p.expect("t", "stream", 1, 4.0, 40)) == [], "it may come yet: nothing had ended"
    assert acts(p.grown("t", (4,), 16, 4.0)) == [] and p.open_count() == 1


def test_a_watched_request_that_never_comes_to_a_registration(p):
    p.watch("r", "t", 50, 1.0)
    p.register("d", reg(), 2.0)
    told, ended = acts(p.tick(3.0))
    assert told.message.code == "prefill_never_came" and ended == reached(0, 0, ended=True) and gone(p)


@pytest.mark.parametrize("how", ["unwatch", "peer_gone"])
def test_an_asker_that_is_gone_is_told_nothing(p, how):
    p.watch("r", "t", 50, 0.0)
    p.watch("s", "t", 50, 0.0)
    assert (p.unwatch("r") if how == "unwatch" else p.peer_gone("r", "lost", 0.0)) in (None, [])
    p.expect("t", "stream", 1, 0.0, 40)
    assert acts(p.ready("t", BLOCKS, 40, 0.0)) == [reached(40, asker="s")]


def test_a_registration_that_ended_before_its_request_came_is_not_served_when_it_comes_again(p):
    p.register("d", reg(), 0.0)
    p.cancel("d", 1, "by the test", 0.1)
    p.tick(5.0)
    p.expect("t", "stream", 1, 6.0, 40)
    p.ready("t", BLOCKS, 40, 6.0)
    out = acts(p.register("d", reg(), 6.1))
    assert [type(one).__name__ for one in out] == ["Send"] and out[0].message.code
