"""The table of sessions: bounded, expiring by an injected clock, and nothing stays behind."""

from __future__ import annotations

import pytest

from kvferry.render.sessions import KEEP_DONE_S, SessionTable, TableFull


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Kept:
    def __init__(self) -> None:
        self.done = False
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1
        self.done = True


def table(clock: Clock, **given: float) -> SessionTable[Kept]:
    settings = {"most": 3, "ttl_s": 600.0} | given
    return SessionTable(most=int(settings["most"]), ttl_s=settings["ttl_s"], clock=clock)


def test_a_session_lives_as_long_as_it_is_asked_for() -> None:
    clock, session = Clock(), Kept()
    kept = table(clock)
    name = kept.add(session)
    for _ in range(3):
        clock.now += 600
        assert kept.get(name) is session
    clock.now += 600.1
    assert kept.get(name) is None
    assert (session.cancelled, len(kept), kept.expired) == (1, 0, 1)


def test_the_sweep_ends_whoever_is_late_and_nobody_else() -> None:
    clock = Clock()
    kept = table(clock)
    old, asked, ended = Kept(), Kept(), Kept()
    kept.add(old)
    name = kept.add(asked)
    ended.done = True
    last = kept.add(ended)
    clock.now += 590
    assert kept.get(name) is asked
    assert kept.get(last) is None
    clock.now += 20
    kept.sweep()
    assert (old.cancelled, asked.cancelled) == (1, 0)
    assert kept.expired == 1


def test_one_that_has_ended_stays_for_a_lost_reply_and_no_longer() -> None:
    clock, session = Clock(), Kept()
    kept = table(clock)
    name = kept.add(session)
    session.done = True
    clock.now += KEEP_DONE_S
    kept.sweep()
    assert kept.get(name) is session
    clock.now += KEEP_DONE_S + 0.1
    kept.sweep()
    assert kept.get(name) is None
    assert kept.expired == 0


def test_a_full_table_refuses_until_one_has_ended() -> None:
    kept = table(Clock(), most=2)
    first, second = Kept(), Kept()
    names = [kept.add(first), kept.add(second)]
    with pytest.raises(TableFull):
        kept.check_room()
    second.done = True
    kept.add(Kept())
    assert kept.get(names[0]) is first
    assert kept.get(names[1]) is None
    with pytest.raises(TableFull):
        kept.add(Kept())


def test_names_cannot_be_guessed_and_clearing_ends_all() -> None:
    kept = table(Clock())
    sessions = [Kept(), Kept()]
    names = {kept.add(session) for session in sessions}
    assert len(names) == 2
    assert all(len(name) == 32 for name in names)
    kept.clear()
    assert [session.cancelled for session in sessions] == [1, 1]
    assert len(kept) == 0
