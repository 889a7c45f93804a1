from __future__ import annotations

import pytest

from kvferry.protocol.instructions import Note, Send
from kvferry.protocol.landing import Destination, Doomed, Landings, Outcome, StartRead
from kvferry.protocol.messages import Cancel, Fetched, Register
from kvferry.protocol.table import UnexpectedEvent


def where(mode="push", peers=(("p0", 1),), request="r"):
    return Destination(request, "t", mode, 0, 40, (7, 8, 9), peers)


def acts(instructions):
    return [one for one in instructions if not isinstance(one, Note)]


def cancel(reg_id, reason):
    return Cancel(reg_id=reg_id, reason=reason)


def gone(d):
    return d.open_count() == 0 and d.next_due() is None and not d._by_reg


@pytest.fixture
def d():
    return Landings(dial_s=4.0, prefill_s=20.0, transfer_s=3.0, fence_s=5.0, settle_s=0.75)


def opened(d, mode="push", peers=(("p0", 1),)):
    out = acts(d.open(where(mode, peers), {peer for peer, _ in peers}, 0.0))
    assert all(isinstance(one.message, Register) for one in out) and len(out) == len(peers)
    return [one.message.reg_id for one in out]


def test_push(d):
    (r,) = opened(d)
    assert d.incoming() == 0
    assert acts(d.begun(r, True, 1.0)) == [] and d.incoming() == 1
    assert acts(d.landed(r, 2.0)) == [Outcome(where(), True, "", "")] and gone(d)
    assert d.landed(r, 2.0) == [] and d.failed(r, "x", "late", 2.0) == []  # C61: late or twice


def test_each_prefill_rank_with_something_open_gets_an_equal_part_of_the_credit():
    d = Landings(dial_s=4.0, prefill_s=20.0, transfer_s=3.0, fence_s=5.0, credit=5)
    first, second = acts(d.open(where("stream", (("p0", 2), ("p1", 2))), {"p0", "p1"}, 0.0))
    assert (first.message.credit, second.message.credit) == (5, 2)
    assert acts(d.open(where("stream", (("p9", 1),), "s"), set(), 0.0)) == []
    (third,) = acts(d.open(where("stream", (("p1", 1),), "u"), {"p1"}, 0.0))
    assert third.message.credit == 2, "a rank that isn't connected takes nothing"
    d.landed(first.message.reg_id, 0.0)
    (fourth,) = acts(d.open(where("stream", (("p1", 1),), "v"), {"p1"}, 0.0))
    assert fourth.message.credit == 5
    many = Landings(dial_s=4.0, prefill_s=20.0, transfer_s=3.0, fence_s=5.0, credit=2)
    peers = tuple((f"p{i}", 1) for i in range(4))
    assert [one.message.credit for one in acts(many.open(where("stream", peers), dict(peers).keys(), 0.0))][-1] == 1


def test_pull_counts_only_when_p_confirms(d):
    (r,) = opened(d, "pull")
    (read,) = acts(d.granted(r, (1, 2, 3), 0.0))
    assert isinstance(read, StartRead) and read.source_block_ids == (1, 2, 3)
    assert acts(d.read_done(r, 0.5)) == [Send("p0", Fetched(reg_id=r, ok=True))] and d.open_count() == 1
    assert acts(d.landed(r, 0.6)) == [Outcome(where("pull"), True, "", "")] and gone(d)


def test_c54_blocks_that_did_not_hold_still_are_no_success(d):
    (r,) = opened(d, "pull")
    d.granted(r, (1, 2, 3), 0.0)
    d.read_done(r, 0.5)
    (outcome,) = acts(d.failed(r, "lease_lapsed", "too late", 0.6))
    assert (outcome.ok, outcome.code) == (False, "lease_lapsed") and gone(d)


def test_registers_when_connected_and_gives_up_dialling_in_time(d):
    assert acts(d.open(where(), set(), 0.0)) == [] and d.next_due() == 4.0
    (outcome,) = acts(d.tick(4.0))
    assert outcome.code == "peer_unreachable" and "4 s" in outcome.reason and gone(d)
    assert acts(d.open(where(), set(), 10.0)) == []
    assert isinstance(acts(d.connected("p0", 11.0))[0].message, Register) and d.next_due() == 31.0


def test_cancel_waits_for_the_acknowledgement(d):
    (r,) = opened(d)
    assert acts(d.cancel("r", "client left", 1.0)) == [Send("p0", cancel(r, "client left"))]
    assert d.cancel("r", "again", 1.0) == [] and d.incoming() == 1
    assert acts(d.begun(r, True, 1.0)) == []
    (outcome,) = acts(d.failed(r, "cancelled", "ok", 2.0))
    assert (outcome.ok, outcome.code, outcome.reason) == (False, "cancelled", "client left") and gone(d)


def test_cancel_crosses_landed(d):
    (r,) = opened(d)
    d.begun(r, True, 0.5)
    d.cancel("r", "client left", 1.0)
    (outcome,) = acts(d.landed(r, 1.0))
    assert (outcome.ok, outcome.code) == (False, "cancelled") and gone(d)
    assert d.failed(r, "expired_transfer", "answer to the cancel", 1.0) == []


def test_first_failing_leg_cancels_its_siblings(d):
    a, b, c = opened(d, peers=(("p0", 1), ("p1", 1), ("p2", 1)))
    d.begun(b, True, 0.0)
    d.landed(c, 0.0)
    out = acts(d.failed(a, "write_failed", "broken", 1.0))
    assert out[0] == Send("p1", cancel(b, "broken")) and isinstance(out[1], Doomed) and d.open_count() == 1
    (outcome,) = acts(d.landed(b, 1.5))
    assert (outcome.ok, outcome.code, outcome.reason) == (False, "write_failed", "broken") and gone(d)


def test_c41_reads_are_waited_for(d):
    (r,) = opened(d, "pull")
    d.granted(r, (1,), 0.0)
    assert acts(d.cancel("r", "client left", 0.1)) == []
    assert acts(d.failed(r, "abandoned", "x", 0.2)) == [] and acts(d.peer_gone("p0", "peer_gone", "x", 0.3)) == []
    out = acts(d.read_done(r, 0.4))
    assert out[0] == Send("p0", Cancel(reg_id=r, reason="client left")) and not out[1].ok and gone(d)


@pytest.mark.parametrize("phase", ["registered", "streaming", "landing", "cancelling"])
def test_c43_lost_peer_may_have_bytes_on_the_way(d, phase):
    (r,) = opened(d)
    if phase != "registered":
        d.begun(r, phase != "streaming", 0.5)
    if phase == "cancelling":
        d.cancel("r", "client left", 0.6)
    told = acts(d.peer_gone("p0", "peer_gone", "lost", 1.0))
    assert [type(one) for one in told] == ([] if phase == "cancelling" else [Doomed])
    assert d.incoming() == 1 and d.next_due() == 1.75
    assert d.begun(r, True, 1.1) == [] and d.landed(r, 1.1) == [] and acts(d.tick(1.7)) == []
    (outcome,) = acts(d.tick(1.75))
    assert not outcome.ok and outcome.code == ("cancelled" if phase == "cancelling" else "peer_gone") and gone(d)


def test_peer_lost_before_it_knew_of_us_or_after_our_reads_ends_at_once(d):
    d.open(where(), set(), 0.0)
    assert not acts(d.peer_gone("p0", "peer_gone", "lost", 1.0))[0].ok and gone(d)
    (r,) = opened(d, "pull")
    d.granted(r, (1,), 0.0)
    d.read_done(r, 0.1)
    assert not acts(d.peer_gone("p0", "peer_gone", "lost", 1.0))[0].ok and gone(d)


def test_time_limits(d):
    (r,) = opened(d)
    cancel, doomed = acts(d.tick(20.0))  # prefill_s: P may begin any moment, so it is asked first
    assert isinstance(cancel.message, Cancel) and "20 s" in cancel.message.reason
    assert isinstance(doomed, Doomed) and doomed.code == "transfer_timeout"
    again = acts(d.tick(1000.0))  # either word may have been lost
    assert again == [cancel] and d.open_count() == 1, "no time frees blocks that P may write to"
    assert acts(d.failed(r, "cancelled", "done", 1000.0))[0].code == "transfer_timeout" and gone(d)
    (r,) = opened(d)
    d.begun(r, True, 0.0)
    cancel, doomed = acts(d.tick(3.0))  # C43
    assert isinstance(cancel.message, Cancel) and isinstance(doomed, Doomed) and "3 s" in doomed.reason
    assert not acts(d.landed(r, 4.0))[0].ok and gone(d), "too late is too late"


def test_silence_fails_the_request_and_keeps_the_blocks(d):
    (r,) = opened(d)
    d.begun(r, True, 0.0)
    cancel, doomed = acts(d.silent("p0", "silent for 30 s", 1.0))
    assert isinstance(cancel.message, Cancel) and (doomed.code, doomed.reason) == ("peer_gone", "silent for 30 s")
    assert acts(d.silent("p0", "again", 2.0)) == [] and d.open_count() == 1
    d.peer_gone("p0", "peer_gone", "lost", 3.0)
    assert acts(d.tick(3.75))[0].code == "peer_gone" and gone(d)


def test_an_unconfirmed_read_ends(d):
    (r,) = opened(d, "pull")
    d.granted(r, (1,), 0.0)
    d.read_done(r, 0.1)
    cancel, outcome = acts(d.tick(5.1))
    assert isinstance(cancel.message, Cancel), "P may not know that its blocks were read"
    assert outcome.code == "transfer_timeout" and gone(d)


def test_second_landing_of_an_open_request_is_ignored(d):
    opened(d)
    assert d.open(where(), {"p0"}, 0.0) == [] and d.open_count() == 1


def test_cancel_of_an_unknown_request_is_nothing(d):
    assert d.cancel("who", "x", 0.0) == []


def test_impossible_order_raises_and_changes_nothing(d):
    (r,) = opened(d)
    with pytest.raises(UnexpectedEvent):
        d.read_done(r, 0.0)
    assert acts(d.landed(r, 0.0))[0].ok


def test_legs_that_lapse_together_end_once(d):
    assert acts(d.open(where(peers=(("p0", 1), ("p1", 1))), set(), 0.0)) == []
    (outcome,) = acts(d.tick(4.0))
    assert outcome.code == "peer_unreachable" and gone(d)


def test_a_sibling_cancelled_by_a_lapse_gets_its_time_to_answer(d):
    a, b = opened(d, peers=(("p0", 1), ("p1", 1)))
    out = acts(d.tick(20.0))
    assert [type(one) for one in out] == [Send, Send, Doomed] and d.next_due() == 20.0 + d.fence_s
    d.failed(a, "cancelled", "x", 21.0)
    assert not acts(d.failed(b, "cancelled", "x", 21.0))[0].ok and gone(d)


# -- stream: WRITEs come while prefill runs


def streaming(d, peers=(("p0", 1),)):
    regs = opened(d, "stream", peers)
    for r in regs:
        assert acts(d.begun(r, False, 1.0)) == []
    return regs


def test_a_stream_lands_after_its_seal(d):
    (r,) = streaming(d)
    assert d.incoming() == 1 and d.next_due() == 20.0, "the limit of prefill runs on"
    assert acts(d.sealed(r, 15.0)) == [] and d.incoming() == 1 and d.next_due() == 18.0
    assert acts(d.landed(r, 16.0)) == [Outcome(where("stream"), True, "", "")] and gone(d)
    assert d.sealed(r, 17.0) == d.begun(r, False, 17.0) == [], "late or twice"


def test_each_limit_of_a_stream_names_what_took_too_long(d):
    (r,) = streaming(d)
    cancel, doomed = acts(d.tick(20.0))
    assert isinstance(cancel.message, Cancel) and "prefill did not deliver within 20 s" in doomed.reason
    assert acts(d.failed(r, "cancelled", "x", 21.0))[0].code == "transfer_timeout" and gone(d)
    (r,) = streaming(d)
    d.sealed(r, 15.0)
    _, doomed = acts(d.tick(18.0))
    assert "the transfer took more than 3 s" in doomed.reason


def test_cancel_in_the_middle_of_a_stream_waits_for_p(d):
    (r,) = streaming(d)
    assert acts(d.cancel("r", "client left", 1.5)) == [Send("p0", cancel(r, "client left"))]
    assert acts(d.sealed(r, 1.6)) == [] and d.open_count() == 1, "P sealed before it heard of it"
    (outcome,) = acts(d.failed(r, "cancelled", "ok", 2.0))
    assert (outcome.ok, outcome.code, outcome.reason) == (False, "cancelled", "client left") and gone(d)


def test_a_stream_that_failed_at_p(d):
    (r,) = streaming(d)
    assert acts(d.failed(r, "aborted", "P's client left", 2.0)) == [
        Outcome(where("stream"), False, "aborted", "P's client left")
    ]
    assert gone(d)


def test_one_rank_of_p_fails_while_the_other_streams(d):
    peers = (("p0", 1), ("p1", 1))
    a, b = streaming(d, peers)
    d.sealed(a, 2.0)
    assert acts(d.landed(a, 2.0)) == []
    assert isinstance(acts(d.peer_gone("p1", "peer_gone", "lost", 2.5))[0], Doomed)
    assert d.begun(b, False, 2.6) == d.sealed(b, 2.6) == [], "what it said before it was lost"
    assert acts(d.tick(3.25)) == [Outcome(where("stream", peers), False, "peer_gone", "lost")] and gone(d)


def test_silence_in_the_middle_of_a_stream(d):
    (r,) = streaming(d)
    told, doomed = acts(d.silent("p0", "silent for 30 s", 5.0))
    assert isinstance(told.message, Cancel) and isinstance(doomed, Doomed) and d.open_count() == 1
    assert acts(d.sealed(r, 9.0)) == [] and acts(d.landed(r, 9.0))[0].code == "peer_gone" and gone(d)


@pytest.mark.parametrize("first", ["sealed first", "begun twice", "sealed twice", "begun last"])
def test_words_of_a_stream_lost_twice_or_late(d, first):
    (r,) = opened(d, "stream")
    words = {
        "sealed first": [d.sealed],
        "begun twice": [d.begun, d.begun],
        "sealed twice": [d.begun, d.sealed, d.sealed],
        "begun last": [d.sealed, d.begun],
    }
    for word in words[first]:
        acts(word(r, False, 0.0) if word == d.begun else word(r, 0.0))
    assert d.incoming() == 1 and acts(d.landed(r, 0.0))[0].ok


@pytest.mark.parametrize("begun", [False, True])
def test_an_abandoned_transfer_ends_and_its_blocks_wait_for_p(d, begun):
    (r,) = opened(d)
    if begun:
        d.begun(r, True, 1.0)
    out = acts(d.abandon("t", "a router's word", 2.0))
    assert out == [Send("p0", cancel(r, "a router's word")), Doomed(where(), "abandoned", "a router's word")]
    assert d.abandon("t", "again", 2.0) == [] and d.abandon("another", "x", 2.0) == []
    (outcome,) = acts(d.failed(r, "cancelled", "P's word", 3.0))
    assert (outcome.ok, outcome.code) == (False, "abandoned") and gone(d)


def test_an_abandoned_transfer_that_was_still_dialled_ends_at_once(d):
    d.open(where(), set(), 0.0)
    (outcome,) = acts(d.abandon("t", "a router's word", 1.0))
    assert (outcome.ok, outcome.code) == (False, "abandoned") and gone(d)
