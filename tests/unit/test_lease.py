from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.lease import Deadlines


def test_c55_a_renewed_entry_in_front_hides_no_lapsed_one():
    deadlines: Deadlines[int] = Deadlines()
    for key in range(1, 11):
        deadlines.set(key, 2.0)
    deadlines.set(1, 3.0)
    assert deadlines.lapsed(1.0) == []
    deadlines.set(1, 4.0)
    assert deadlines.lapsed(2.0) == list(range(2, 11))
    assert len(deadlines) == 1 and 1 in deadlines and deadlines.next_due() == 4.0


def test_c56_only_differences_of_the_callers_own_clock_matter():
    for epoch in (-3600.0, 0.0, 3600.0):
        deadlines: Deadlines[str] = Deadlines()
        deadlines.set("a", epoch + 30.0)
        assert deadlines.lapsed(epoch + 29.9) == []
        assert deadlines.lapsed(epoch + 30.0) == ["a"]


def test_cleared_key_never_lapses_and_may_come_back():
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.clear("a")
    deadlines.clear("never set")
    assert deadlines.next_due() is None and deadlines.lapsed(9.0) == []
    deadlines.set("a", 1.0)
    deadlines.set("a", 1.0)
    assert deadlines.lapsed(1.0) == ["a"] and deadlines.lapsed(1.0) == []


@given(
    st.lists(st.tuples(st.sampled_from(["set", "clear", "lapse"]), st.integers(0, 5), st.integers(0, 20)), max_size=400)
)
def test_behaves_like_a_plain_dict(steps):
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for what, key, when in steps:
        if what == "set":
            deadlines.set(key, when)
            plain[key] = when
        elif what == "clear":
            deadlines.clear(key)
            plain.pop(key, None)
        else:
            due = {key for key, at in plain.items() if at <= when}
            got = deadlines.lapsed(when)
            assert set(got) == due and len(got) == len(due)
            assert [plain[key] for key in got] == sorted(plain[key] for key in got)
            for key in due:
                del plain[key]
        assert deadlines.next_due() == min(plain.values(), default=None)
        assert len(deadlines) == len(plain) and len(deadlines._heap) <= max(65, 4 * len(plain) + 1)
