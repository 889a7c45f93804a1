"""For each request: what it asks of engines, whether it is let in, whether it takes a pair, and which one.

Owner: the event loop. All that is decided here is decided by pure functions: `policy.py`, `disaggregate.py`,
`admission.fits`; this is where they get what they look at.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvferry.observe.metrics import RouterMetrics
from kvferry.router.choice.admission import Gate, Overloaded, Verdict
from kvferry.router.choice.ask import Ask
from kvferry.router.choice.cost import Costs, Estimate
from kvferry.router.choice.disaggregate import decide
from kvferry.router.choice.sessions import session_of
from kvferry.router.config import RouterConfig
from kvferry.router.engines.pool import Engine, Pool
from kvferry.router.replies import Refusal
from kvferry.router.requests.openai import Body, Plan
from kvferry.router.requests.prompt import Prompt

log = logging.getLogger("kvferry.router")


class Choice(msgspec.Struct, frozen=True):
    """`prefill` None: D alone. `decode` picks D when it is called; raises `Refusal`."""

    ask: Ask
    prefill: Engine | None
    decode: Callable[[], Engine]


class Selection:
    def __init__(self, config: RouterConfig, pool: Pool, metrics: RouterMetrics) -> None:
        self._config, self._pool, self._metrics = config, pool, metrics
        self.costs = Costs()
        self.gate: Gate | None = None
        self._decisions = 0
        if config.ttft_slo_ms and not config.colocated:
            self.gate = Gate(config.ttft_slo_ms / 1e3, config.slo_action, config.slo_queue, config.slo_queue_s)
            pool.told_freed = self.gate.freed

    def ask(self, part: Body, plan: Plan, headers: Mapping[str, str]) -> Ask:
        prompt = Prompt(part)
        tokens = prompt.tokens if prompt.exact else prompt.parts + self.costs.tokens_of(prompt.nbytes)
        return Ask(
            model=self._pool.known(plan.model),
            tokens=tokens,
            prompt=prompt if self._config.watches_prefixes else None,
            session=session_of(headers, part),
        )

    async def admit(self, asks: Sequence[Ask], client: str, deadline: float | None) -> Verdict:
        """Returns when the request may go. Raises `Overloaded`. `client`: whose turn it takes. `deadline`: the
        request's, on the loop's clock."""
        gate = self.gate
        if gate is None:
            return "admitted"
        try:
            async with asyncio.timeout_at(deadline):
                verdict = await gate.admit(client, functools.partial(self.estimate, asks))
        except TimeoutError:
            self._metrics.slo_decisions.labels("shed").inc()
            raise Overloaded("the request's deadline passed while it waited for prefill", 1.0) from None
        except Overloaded:
            self._metrics.slo_decisions.labels("shed").inc()
            raise
        self._metrics.slo_decisions.labels(verdict).inc()
        return verdict

    def estimate(self, asks: Sequence[Ask]) -> Estimate:
        """Of the last of a request's parts, which wait for each other, at the best prefill engine."""
        tokens = sum(ask.tokens for ask in asks)
        able = self._pool.able("prefill", asks[0])
        if not able:
            return Estimate(0, None)
        best = min(able, key=lambda engine: engine.tokens - engine.matched)
        ttft = self.costs.ttft_s(best.tokens, max(1, tokens - best.matched), asks[0].tokens)
        return Estimate(min(engine.tokens for engine in able), ttft)

    def choose(self, plan: Plan, ask: Ask, *, avoid: frozenset[str] = frozenset(), alone: bool = False) -> Choice:
        """`avoid`: URLs that are to take it only if no other can. `alone`: decode is to compute the prompt, if it
        can. Raises `Refusal` if there is no engine for a leg that is to be chosen now."""
        pool, config = self._pool, self._config
        decode = functools.partial(pool.pick, "decode", ask, avoid=avoid)
        if config.colocated:
            return Choice(ask, None, decode)
        if plan.alone:
            return Choice(ask, None, functools.partial(pool.pick, "prefill", ask, avoid=avoid))
        stays = self._stays(plan, ask, avoid, alone)
        self._metrics.disagg_decisions.labels("prefill-decode" if stays is None else "decode-only").inc()
        if stays is not None:
            engine = stays
            return Choice(ask, None, lambda: engine)
        try:
            prefill = pool.pick("prefill", ask, avoid=avoid)
        except Refusal as refusal:
            if not config.allow_local_prefill:
                raise
            log.warning("a decode engine computes a prompt itself: %s", refusal)
            self._metrics.local_prefills.inc()
            return Choice(ask, None, decode)
        near = msgspec.structs.replace(ask, topology=prefill.spec.topology)
        return Choice(ask, prefill, functools.partial(pool.pick, "decode", near, avoid=avoid))

    def _stays(self, plan: Plan, ask: Ask, avoid: frozenset[str], alone: bool) -> Engine | None:
        """The decode engine that computes this prompt itself, or None."""
        setting = self._config.disaggregate
        if plan.prompt_logprobs is not None or (setting == "always" and not alone):
            return None
        if not self._pool.able("decode", ask):
            return None
        if not alone:
            self._decisions += 1
            best = self._pool.peek("decode", ask)
            uncached = ask.tokens - best.matched
            if decide(setting, uncached, self.costs, best.in_flight, self._decisions) == "prefill-decode":
                return None
        return self._pool.pick("decode", ask, avoid=avoid)
