"""Linear time for vLLM's streaming parsers: per token, `StreamState` makes a new list of all token ids so far.

Here two lists take turns: one has the ids before a delta, the other those with it, and each grows in place. Parsers see
what they saw: two lists of their own. One that kept a list from an earlier call would see it grow; none of vLLM's does.
"""

from __future__ import annotations

from typing import Any

_PAIR = "kvferry_pair"


class Pair:
    """`before` is what the state holds as previous; `other` lags behind it by `late`, or is ahead by `delta`."""

    def __init__(self, before: list[int]) -> None:
        self.before = before
        self.other = list(before)
        self._late: list[int] = []
        self._delta: list[int] = []

    def advance(self, delta: list[int]) -> list[int]:
        """`before` with the delta."""
        self.other.extend(self._late)
        # Asked again before a commit: the first answer is taken back.
        del self.other[len(self.before) :]
        self.other.extend(delta)
        self._late, self._delta = [], list(delta)
        return self.other

    def commit(self) -> list[int]:
        self.before, self.other = self.other, self.before
        self._late = self._delta
        return self.before


def install(state_class: Any) -> None:
    """For `StreamState`; where a version has none of these methods, nothing is changed. Idempotent."""
    advance, commit = getattr(state_class, "advance", None), getattr(state_class, "commit", None)
    if advance is None or commit is None or hasattr(state_class, "kvferry_linear"):
        return

    def linear_advance(self: Any, delta_text: str, delta_token_ids: list[int]) -> Any:
        if self.engine_based:
            return advance(self, delta_text, delta_token_ids)
        pair = getattr(self, _PAIR, None)
        if pair is None or self.previous_token_ids is not pair.before:
            # The first time, or the parser has put other ids there.
            pair = Pair(self.previous_token_ids)
            setattr(self, _PAIR, pair)
        return self.previous_text + delta_text, pair.advance(delta_token_ids)

    def linear_commit(self: Any, current_text: str, current_token_ids: list[int]) -> None:
        pair = getattr(self, _PAIR, None)
        if pair is None or current_token_ids is not pair.other or self.previous_token_ids is not pair.before:
            commit(self, current_text, current_token_ids)
            return
        self.previous_text = current_text
        self.previous_token_ids = pair.commit()

    state_class.advance, state_class.commit, state_class.kvferry_linear = linear_advance, linear_commit, True
