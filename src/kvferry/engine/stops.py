"""Stop strings in the text of one request's output. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.text import Detokenizer


class StopFinder:
    """Turns output tokens into text, up to the first stop string; `take` gives what may go out.

    Text that may still become the beginning of a stop string is held back, unless stop strings are part of the output.
    No stop string is looked for among the first `min_tokens` tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, include: bool, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._include = include
        self._min_tokens = min_tokens
        self._longest = max(map(len, stops))
        self._hold = 0 if include else self._longest - 1
        self._text = ""
        """The output's end: what was sent long ago is gone."""
        self._sent = 0
        self._tokens = 0

    def add(self, token_ids: Sequence[int], *, skip_last: bool = False) -> tuple[int, str | None]:
        """How many of the tokens belong to the output, and the stop string that ended it, if one did.

        `skip_last`: the last token ended the request and is not part of its text.
        """
        for at, token_id in enumerate(token_ids):
            before = len(self._text)
            self._tokens += 1
            if not (skip_last and at == len(token_ids) - 1):
                self._text += self._detokenizer.add((token_id,))
            if self._tokens > self._min_tokens and len(self._text) > before:
                found = self._search(before)
                if found is not None:
                    return at + 1, found
        return len(token_ids), None

    def _search(self, before: int) -> str | None:
        """The stop string that ends first, beyond `before`. The text is cut there."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        if best is None:
            return None
        end, stop = best
        self._text = self._text[: end if self._include else end - len(stop)]
        return stop

    def take(self, *, finished: bool) -> str:
        """The text since the last call that may go out."""
        end = len(self._text) - (0 if finished else self._hold)
        if end <= self._sent:
            return ""
        piece = self._text[self._sent : end]
        gone = max(0, end - self._longest)
        self._text, self._sent = self._text[gone:], end - gone
        return piece
