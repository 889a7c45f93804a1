"""A router's render tier, tied to its engines: whoever joins must render and parse as the tier does."""

from __future__ import annotations

import logging

from kvferry.observe.metrics import RouterMetrics
from kvferry.router.config import RouterConfig
from kvferry.router.engines.pool import Engine, Pool
from kvferry.router.http.upstream import Upstream
from kvferry.router.render.metrics import RenderMetrics
from kvferry.router.render.settings import fits, of_engine
from kvferry.router.render.tier import Tier

log = logging.getLogger("kvferry.router")

COMPARED = "its settings are being compared with those of the render tier"


def tier_of(config: RouterConfig, upstream: Upstream, metrics: RouterMetrics, pool: Pool) -> Tier | None:
    """None without `--render`."""
    if not config.render:
        return None
    tier = Tier(config, upstream, RenderMetrics(metrics.registry), changed=lambda: pool.recheck(COMPARED))
    untold: set[str] = set()

    async def check(engine: Engine) -> None:
        """Raises `CompatError`, `PeerUnreachable`."""
        told = tier.settings
        if told is None:
            return  # no session can be opened yet; all are asked again then
        settings = await of_engine(engine.url, upstream, config.api_key)
        what = f"{engine.role} engine {engine.url}"
        if settings is not None:
            fits(told.settings, settings, what)
        elif engine.url not in untold:
            untold.add(engine.url)
            log.warning("%s does not tell its settings: whether it parses as the render tier does is not known", what)

    pool.fits = check
    return tier
