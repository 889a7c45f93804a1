"""What all requests of one router share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvferry.observe.metrics import RouterMetrics
from kvferry.router.config import RouterConfig
from kvferry.router.dispatch.selection import Selection
from kvferry.router.engines.budget import RetryBudget
from kvferry.router.engines.dialect import Dialect
from kvferry.router.engines.membership import Membership
from kvferry.router.engines.pool import Pool
from kvferry.router.http.upstream import Upstream
from kvferry.router.render.tier import Tier
from kvferry.router.seen.seen import Seen
from kvferry.story import Story


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """`dialect` None: colocated. `spawn` runs a coroutine beside the request; shutdown waits for it. `render` None:
    engines render."""

    config: RouterConfig
    dialect: Dialect | None
    pool: Pool
    members: Membership
    selection: Selection
    upstream: Upstream
    story: Story
    metrics: RouterMetrics
    seen: Seen
    retry_budget: RetryBudget
    render: Tier | None = None

    def missing(self) -> list[str]:
        """Roles without a ready engine, and `render` where only the tier may render, and is not there."""
        needed = self.render is not None and not self.render.ready and self.config.render_fallback == "error"
        return [*self.pool.missing(), *(["render"] if needed else [])]

    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
