from __future__ import annotations

import pytest
from rendezvous_parts import BLOCKS, acts, failed, gone, machine, reg

from kvferry.protocol.instructions import Release, Send, StartWrite
from kvferry.protocol.messages import Begin, Failed, Grant, Landed
from kvferry.protocol.rendezvous import Rendezvous
from kvferry.protocol.stream import Span
from kvferry.protocol.table import UnexpectedEvent


@pytest.fixture
def p():
    return machine()


@pytest.mark.parametrize("order", ["register first", "expect first", "ready first"])
def test_push_in_every_order(p, order):
    steps = {
        "expect": lambda: p.expect("t", "push", 1, 0.0),
        "ready": lambda: p.ready("t", BLOCKS, 40, 0.5),
        "register": lambda: p.register("d", reg(), 0.5),
    }
    orders = {
        "register first": ("register", "expect", "ready"),
        "expect first": ("expect", "register", "ready"),
        "ready first": ("expect", "ready", "register"),
    }
    out = [one for step in orders[order] for one in acts(steps[step]())]
    assert out == [Send("d", Begin(reg_id=1, sealed=True)), StartWrite("d", reg(), BLOCKS, Span(0, 40))]
    assert p.tick(99.0) == []  # no lease while WRITEs are under way
    done = acts(p.wrote("d", 1, 1.0, nbytes=9, descriptors=2))
    assert done == [Send("d", Landed(reg_id=1, nbytes=9, descriptors=2)), Release("t", True, "", "")]
    assert gone(p)


def test_pull_is_released_when_read(p):
    p.expect("t", "pull", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    assert acts(p.register("d", reg(mode="pull"), 0.0)) == [Send("d", Grant(reg_id=1, block_ids=BLOCKS))]
    assert p.being_read() == 1 and p.tick(50.0) == []
    out = acts(p.fetched("d", 1, True, 60.0))
    assert out == [Send("d", Landed(reg_id=1, nbytes=0, descriptors=0)), Release("t", True, "", "")]
    assert gone(p)


def test_c39_registration_never_comes(p):
    p.expect("t", "push", 1, 0.0)
    p.ready("t", BLOCKS, 40, 10.0)
    assert p.next_due() == 12.0 and p.tick(11.9) == []
    (release,) = acts(p.tick(12.0))
    assert (release.ok, release.code) == (False, "lease_lapsed") and "2 s" in release.reason
    assert gone(p) and p.tick(99.0) == []


@pytest.mark.parametrize("how", ["lapsed", "aborted", "aborted before it was expected"])
def test_c40_c54_late_registration_is_refused_and_wakes_nothing(p, how):
    if how == "lapsed":
        p.expect("t", "push", 1, 0.0)
        p.ready("t", BLOCKS, 40, 0.0)
        p.tick(2.0)
    elif how == "aborted":
        p.expect("t", "push", 1, 0.0)
        p.abort("t", "aborted", "client left", 0.5)
    else:
        p.abort("t", "abandoned", "client left", 0.5)
    (answer,) = p.register("d", reg(), 3.0)
    assert isinstance(answer.message, Failed) and "unknown or expired transfer t" in answer.message.reason
    assert gone(p)
    assert acts(p.expect("t", "push", 1, 4.0)) == []
    (release,) = acts(p.ready("t", BLOCKS, 40, 4.0))
    assert release.ok is False and gone(p)


def test_registration_without_request_lapses(p):
    p.register("d", reg(), 1.0)
    out = acts(p.tick(3.0))
    assert [one.message.code for one in out] == ["prefill_never_came"] and gone(p)


def test_mode_mismatch_names_both_sides_and_leaves_nothing(p):
    p.expect("t", "push", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    out = acts(p.register("d", reg(mode="pull"), 1.0))
    assert out[0].message.code == "mode_mismatch"
    assert "'push'" in out[0].message.reason and "'pull'" in out[0].message.reason
    assert out[1] == Release("t", False, "mode_mismatch", out[0].message.reason) and gone(p)


def test_mode_mismatch_with_more_takers_to_come_keeps_the_lease(p):
    p.expect("t", "push", 2, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    p.register("d", reg(mode="pull"), 1.0)
    assert p.next_due() == 3.0
    (release,) = acts(p.tick(3.0))
    assert not release.ok and gone(p)


def test_prompt_mismatch(p):
    p.expect("t", "push", 1, 0.0)
    p.register("d", reg(end=41), 0.0)
    out = acts(p.ready("t", BLOCKS, 40, 0.0))
    assert out[0].message.code == "prompt_mismatch" and "41" in out[0].message.reason and "40" in out[0].message.reason
    assert isinstance(out[1], Release) and not out[1].ok and gone(p)


def test_duplicate_transfer_id_changes_nothing_for_the_first(p):
    p.expect("t", "push", 1, 0.0)
    (note,) = p.expect("t", "pull", 3, 0.0)
    assert note.event == "duplicate"
    p.ready("t", BLOCKS, 40, 0.0)
    (second,) = acts(p.ready("t", (1, 2, 3), 40, 0.0))
    assert isinstance(second, Release) and not second.ok and p.open_count() == 1
    assert acts(p.register("d", reg(), 0.0))[1].block_ids == BLOCKS


def test_registration_sent_again_is_served_once(p):
    p.expect("t", "push", 2, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    assert len(acts(p.register("d", reg(), 0.0))) == 2
    assert p.register("d", reg(), 0.0) == []
    p.wrote("d", 1, 0.0, nbytes=1, descriptors=1)
    assert p.register("d", reg(), 0.0) == [], "a leg that has ended must not be written again"
    assert p.open_count() == 1


def test_null_registration_releases_at_once(p):
    p.expect("t", "push", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    out = acts(p.register("d", reg(start=0, end=0, blocks=()), 0.0))
    assert out == [Send("d", Landed(reg_id=1, nbytes=0, descriptors=0)), Release("t", True, "", "")] and gone(p)


def test_fan_out_and_legs_multiply(p):
    p.expect("t", "push", 2, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    for i in range(4):
        p.register(f"d{i}", reg(reg_id=i + 1, legs=2), 0.0)
    for i in range(4):
        out = acts(p.wrote(f"d{i}", i + 1, 0.0, nbytes=1, descriptors=1))
        assert any(isinstance(one, Release) for one in out) == (i == 3)
    assert gone(p)


def test_c41_cancel_and_abort_wait_for_the_write(p):
    p.expect("t", "push", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    p.register("d", reg(), 0.0)
    assert acts(p.cancel("d", 1, "client left", 0.0)) == []
    assert acts(p.abort("t", "aborted", "engine", 0.0)) == []
    assert acts(p.peer_gone("d", "lost", 0.0)) == [] and p.open_count() == 1
    assert acts(p.wrote("d", 1, 0.0, nbytes=1, descriptors=1)) == [Release("t", False, "cancelled", "client left")]
    assert gone(p)


def test_c42_failed_write_is_told_at_once(p):
    p.expect("t", "push", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    p.register("d", reg(), 0.0)
    out = acts(p.write_failed("d", 1, "third of five", 0.0))
    assert out == [
        Send("d", failed(1, "write_failed", "third of five")),
        Release("t", False, "write_failed", "third of five"),
    ]
    assert gone(p)


@pytest.mark.parametrize("ok", [True, False])
def test_abort_of_a_granted_source_waits_for_the_reads(p, ok):
    p.expect("t", "pull", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    p.register("d", reg(mode="pull"), 0.0)
    assert acts(p.abort("t", "abandoned", "router", 0.0)) == [Send("d", failed(1, "abandoned", "router"))]
    assert p.being_read() == 1 and p.tick(100.0) == []
    assert acts(p.fetched("d", 1, ok, 101.0)) == [Release("t", False, "abandoned", "router")] and gone(p)


def test_a_pull_that_may_not_read_is_written_as_a_push_is(p):
    p.expect("t", "pull", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    begin, write = acts(p.register("d", reg(mode="pull"), 0.0, reads=False))
    assert begin == Send("d", Begin(reg_id=1, sealed=True)) and isinstance(write, StartWrite)
    assert acts(p.abort("t", "abandoned", "router", 0.0)) == [] and p.being_read() == 0
    assert acts(p.wrote("d", 1, 1.0, nbytes=1, descriptors=1)) == [
        Send("d", failed(1, "abandoned", "router")),
        Release("t", False, "abandoned", "router"),
    ]
    assert gone(p)


def test_fetched_twice_is_answered_not_raised(p):
    p.expect("t", "pull", 1, 0.0)
    p.ready("t", BLOCKS, 40, 0.0)
    p.register("d", reg(mode="pull"), 0.0)
    p.fetched("d", 1, True, 0.0)
    (answer,) = p.fetched("d", 1, True, 0.0)
    assert isinstance(answer.message, Failed) and gone(p)


def test_c61_completion_after_the_end_is_ignored(p):
    assert p.wrote("d", 9, 0.0, nbytes=1, descriptors=1) == []
    assert p.write_failed("d", 9, "late", 0.0) == []


def test_peer_dies_in_each_phase(p):
    p.register("d", reg(), 0.0)
    assert acts(p.peer_gone("d", "lost", 0.0)) == []
    p.expect("t", "push", 1, 1.0)
    out = acts(p.ready("t", BLOCKS, 40, 1.0))
    assert out == [Release("t", False, "peer_gone", "lost")] and gone(p)


def test_no_more_than_remembered_endings_are_kept():
    p = Rendezvous(lease_s=1.0, unseen_s=1.0, remember=3)
    for i in range(10):
        p.abort(f"t{i}", "aborted", "x", 0.0)
    assert len(p._ended) == 3 and p.ending("t9") is not None and p.ending("t0") is None


def test_impossible_order_raises_and_changes_nothing(p):
    p.expect("t", "push", 1, 0.0)
    p.register("d", reg(), 0.0)
    with pytest.raises(UnexpectedEvent):
        p.fetched("d", 1, True, 0.0)
    assert len(acts(p.ready("t", BLOCKS, 40, 0.0))) == 2
