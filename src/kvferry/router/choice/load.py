"""Tokens in flight of one engine: each request adds what it brings and takes it away once. Owner: the event loop."""

from __future__ import annotations

from collections.abc import Callable


class Load:
    """Of one data-parallel rank. `prefill`: prompt tokens that it has yet to compute; `held`: tokens, prompt and
    output, of the requests that it decodes; `shared`: those of them whose blocks were there before. All as far as this
    router knows: other routers' requests don't show."""

    def __init__(self) -> None:
        self.prefill = 0
        self.held = 0
        self.shared = 0
        self.requests = 0

    @property
    def taken(self) -> int:
        """Of `held` those that need blocks of their own."""
        return self.held - self.shared


class Share:
    """One request's part of a `Load`: added when it is made, taken away by `release` (again: nothing happens).

    `prefilled` once the engine has computed its prompt. `freed` is called when tokens went away.
    """

    def __init__(
        self,
        load: Load,
        *,
        prefill: int = 0,
        held: int = 0,
        shared: int = 0,
        freed: Callable[[], None] | None = None,
    ) -> None:
        self._load = load
        self._prefill, self._held, self._shared = prefill, held, shared
        self._freed = freed
        self._open = True
        load.prefill += prefill
        load.held += held
        load.shared += shared
        load.requests += 1

    def prefilled(self) -> None:
        if self._prefill:
            self._load.prefill -= self._prefill
            self._prefill = 0
            self._tell()

    def grow(self, tokens: int) -> None:
        """The answer became longer."""
        if self._open:
            self._held += tokens
            self._load.held += tokens

    def release(self) -> None:
        if self._open:
            self._open = False
            self._load.held -= self._held
            self._load.shared -= self._shared
            self._load.requests -= 1
            self._load.prefill -= self._prefill
            self._prefill = 0
            self._tell()

    def _tell(self) -> None:
        if self._freed is not None:
            self._freed()
