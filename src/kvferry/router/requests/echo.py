"""`echo` with `logprobs`: the prompt's part is P's, the answer's is D's, and the client sees one list. Pure.

P was asked for one token beside its prompt: its lists are one entry longer than the prompt, and the offset of that
last entry is where the answer's offsets begin.
"""

from __future__ import annotations

from typing import Any

from kvferry.router.requests.openai import Body

LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class Echo:
    """Of one prompt. `text`: of the prompt, as the engine shows it. `ids`: the client asked for token ids."""

    def __init__(self, prefill: Body, text: str, *, ids: bool) -> None:
        choice: Body = next(iter(prefill.get("choices") or ()), {})
        logprobs = choice.get("logprobs") or {}
        lists: dict[str, list[Any]] = {name: logprobs.get(name) or [None] for name in LISTS}
        self._prompt = {name: items[:-1] for name, items in lists.items()}
        self._shift = lists["text_offset"][-1] or 0
        self._prompt_logprobs = choice.get("prompt_logprobs")
        self._text = "" if ids else text
        self._ids = ids
        self._opened: set[int] = set()

    def whole(self, choice: Body) -> None:
        """One choice of a whole reply, in place."""
        self._first(choice)
        choice["prompt_logprobs"] = self._prompt_logprobs
        if not self._ids:
            choice["prompt_token_ids"] = None

    def event(self, event: Body) -> bool:
        """Every event of a stream: a choice's first one gets the prompt before it, the others are moved behind it."""
        for choice in event.get("choices") or ():
            if choice.get("index") in self._opened:
                self._move(choice)
            else:
                self._opened.add(choice.get("index"))
                self._first(choice)
        return bool(event.get("choices"))

    def _first(self, choice: Body) -> None:
        self._move(choice)
        choice["text"] = self._text + (choice.get("text") or "")
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            for name in LISTS:
                logprobs[name] = self._prompt[name] + (logprobs.get(name) or [])

    def _move(self, choice: Body) -> None:
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [at + self._shift for at in logprobs["text_offset"]]
        if not self._ids:
            choice["token_ids"] = None
