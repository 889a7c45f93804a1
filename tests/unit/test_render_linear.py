"""Two lists that take turns are, at every call, the lists that a parser would have been given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvferry.render.linear import install


@dataclass
class State:
    """As vLLM's `StreamState`."""

    previous_text: str = ""
    previous_token_ids: list[int] = field(default_factory=list)
    engine_based: bool = False

    def advance(self, text: str, ids: list[int]) -> tuple[str, list[int]]:
        return (text, ids) if self.engine_based else (self.previous_text + text, self.previous_token_ids + ids)

    def commit(self, text: str, ids: list[int]) -> None:
        self.previous_text, self.previous_token_ids = ("", []) if self.engine_based else (text, ids)


class Linear(State):
    pass


install(Linear)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_parser_does_it_sees_the_same(seed: int) -> None:
    rng = random.Random(seed)
    plain, linear = State(), Linear()
    for _ in range(200):
        delta = [rng.randrange(100) for _ in range(rng.randrange(4))]
        seen = [state.advance("x" * len(delta), list(delta)) for state in (plain, linear)]
        assert seen[0] == seen[1]
        assert plain.previous_token_ids == linear.previous_token_ids
        assert linear.previous_token_ids is not seen[1][1]
        what = rng.random()
        if what < 0.1:
            continue  # no commit
        if what < 0.2:  # begins anew within the call
            for state in (plain, linear):
                state.previous_text, state.previous_token_ids = "", []
        ids = None if what < 0.9 else [1, 2]  # or goes on with ids of its own
        for state, (text, current) in zip((plain, linear), seen, strict=True):
            state.commit(text, current if ids is None else list(ids))
        assert plain.previous_token_ids == linear.previous_token_ids
        assert plain.previous_text == linear.previous_text


def test_no_list_is_made_per_token() -> None:
    state = Linear()
    lists = set()
    for number in range(100):
        text, ids = state.advance("x", [number])
        lists.add(id(ids))
        state.commit(text, ids)
    assert len(lists) == 2
    assert state.previous_token_ids == list(range(100))


def test_parsers_with_a_state_of_their_own_keep_it() -> None:
    state = Linear(engine_based=True)
    assert state.advance("a", [1]) == ("a", [1])
    state.commit("a", [1])
    assert (state.previous_text, state.previous_token_ids) == ("", [])


def test_installing_twice_and_where_there_is_nothing_changes_nothing() -> None:
    before = Linear.advance
    install(Linear)
    assert Linear.advance is before

    class Other:
        pass

    install(Other)
    assert not hasattr(Other, "kvferry_linear")
