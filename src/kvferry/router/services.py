"""What all requests of one router share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvferry.observe.metrics import RouterMetrics
from kvferry.router.budget import RetryBudget
from kvferry.router.config import RouterConfig
from kvferry.router.dialect import Dialect
from kvferry.router.membership import Membership
from kvferry.router.pool import Pool
from kvferry.router.seen import Seen
from kvferry.router.selection import Selection
from kvferry.router.upstream import Upstream
from kvferry.story import Story


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """`dialect` None: colocated. `spawn` runs a coroutine beside the request; shutdown waits for it."""

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
    spawn: Callable[[Coroutine[Any, Any, None]], object]
