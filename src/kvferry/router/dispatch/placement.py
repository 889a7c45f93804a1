"""Where one leg runs: engine and data-parallel rank, and the leg's share of their load. Owner: the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from multidict import CIMultiDict

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.load import Share
from kvferry.router.engines.dialect import Source
from kvferry.router.engines.pool import Engine

RANK_HEADER = "X-data-parallel-rank"


class Placement:
    """Made when the engine is chosen, `release`d when the leg is over, once or more often.

    `computes`: the engine computes the prompt; `decodes`: it makes the answer. `work`: tokens that it had to compute,
    with those that waited before, when this leg came. `uncached`: of this prompt.
    """

    def __init__(
        self, engine: Engine, ask: Ask, *, computes: bool, decodes: bool, freed: Callable[[], None] | None = None
    ) -> None:
        self.engine = engine
        self.number = engine.pin(ask)
        rank = engine.ranks[self.number]
        self.uncached = ask.tokens - engine.matched(self.number, ask)
        self._share = Share(
            rank.load,
            prefill=self.uncached if computes else 0,
            held=ask.tokens if decodes else 0,
            shared=ask.tokens - self.uncached if decodes else 0,
            freed=freed,
        )
        self.work = rank.load.prefill
        if ask.prompt is not None:
            rank.sent.sent(ask.prompt)
        self.leg = engine.begin()
        self._open = True

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def side_port(self) -> int:
        """Of this rank's first tensor-parallel rank."""
        return self.engine.side_port(self.number)

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Those of the leg: with the rank, where the engine has several."""
        if len(self.engine.ranks) == 1:
            return headers
        pinned = CIMultiDict(headers)
        pinned[RANK_HEADER] = str(self.number)
        return pinned

    def source(self) -> Source:
        """This rank, as a transfer's parameters name it."""
        engine, spec = self.engine, self.engine.spec
        if len(engine.ranks) == 1:
            return Source(spec, engine.description)
        engine_id = f"{spec.engine_id}_dp{self.number}" if spec.engine_id else ""
        about = engine.descriptions[self.number] if engine.descriptions else None
        spec = msgspec.structs.replace(spec, side_port=self.side_port, engine_id=engine_id)
        return Source(spec, about, self.number)

    def prefilled(self) -> None:
        """The prompt is computed."""
        self._share.prefilled()

    def grow(self, tokens: int) -> None:
        self._share.grow(tokens)

    def release(self) -> None:
        self._share.release()
        if self._open:
            self._open = False
            self.engine.end(self.leg)
