"""Whether a request can meet the TTFT objective now; if not, it waits, is turned away, or decode computes it itself.

An idle prefill engine takes any request: waiting would not make it faster, and what is seen of it keeps the estimate
honest. Nothing is turned away before anything was measured. Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from kvferry.router.choice.cost import Estimate
from kvferry.router.config import Action
from kvferry.router.replies import Refusal

Verdict = Literal["admitted", "queued", "colocated"]
REASON = "ttft_slo"
RELAX = 0.8
"""Once requests are held back, one is let in when its estimate is below so much of the objective: else the gate would
open and close with every request that ends."""


class Overloaded(Refusal):
    """429 with a reason, and how long to wait before the next try."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(429, REASON, message, hint="--ttft-slo sets the objective, --slo-action what is done")
        self.retry_after_s = max(1, math.ceil(retry_after_s))


def fits(estimate: Estimate, slo_s: float, held_back: bool) -> bool:
    """Whether it is let in. `held_back`: another one was not, a moment ago."""
    if estimate.ttft_s is None or not estimate.waiting:
        return True
    return estimate.ttft_s <= slo_s * (RELAX if held_back else 1.0)


class Gate:
    """`most`: requests that wait at once; `limit_s`: how long one does. Clients are served in turn, each one's requests
    in their order; a new one does not overtake those that wait."""

    def __init__(self, slo_s: float, action: Action, most: int, limit_s: float) -> None:
        self._slo_s, self._action, self._most, self._limit_s = slo_s, action, most, limit_s
        self._waiting: OrderedDict[str, deque[asyncio.Event]] = OrderedDict()
        self.waiting = 0
        self.held_back = False

    async def admit(self, client: str, estimate: Callable[[], Estimate]) -> Verdict:
        """Returns when it may go, in the step in which `estimate` said so. Raises `Overloaded`."""
        now = estimate()
        if not self.waiting and self._fits(now):
            return "admitted"
        if self._action == "colocate":
            return "colocated"
        if self._action == "shed":
            raise self._overloaded(now)
        if self.waiting >= self._most:
            raise self._overloaded(now, f", and {self.waiting} requests wait already")
        await self._turn(client, estimate)
        return "queued"

    def freed(self) -> None:
        """Some work was done: the one whose turn it is may look again."""
        if self._waiting:
            next(iter(self._waiting.values()))[0].set()

    def _fits(self, estimate: Estimate) -> bool:
        """Remembers what it said."""
        good = fits(estimate, self._slo_s, self.held_back)
        self.held_back = not good or (self.held_back and bool(self.waiting))
        return good

    async def _turn(self, client: str, estimate: Callable[[], Estimate]) -> None:
        ticket = asyncio.Event()
        self._waiting.setdefault(client, deque()).append(ticket)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                while True:
                    await ticket.wait()
                    ticket.clear()
                    if self._fits(estimate()):
                        return
        except TimeoutError:
            raise self._overloaded(estimate(), f", and it has waited {self._limit_s:g} s") from None
        finally:
            self._leave(client, ticket)

    def _leave(self, client: str, ticket: asyncio.Event) -> None:
        self.waiting -= 1
        own = self._waiting[client]
        own.remove(ticket)
        if own:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        self.freed()

    def _overloaded(self, estimate: Estimate, more: str = "") -> Overloaded:
        told = estimate.ttft_s or 0.0
        said = (
            f"the first token would take about {told * 1e3:.0f} ms, the objective is {self._slo_s * 1e3:.0f} ms{more}"
        )
        return Overloaded(said, told - self._slo_s)
