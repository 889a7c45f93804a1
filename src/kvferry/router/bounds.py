"""Numbers of the command line that are out of range: one error, under the option's name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.router.config import RouterConfig


def check_bounds(config: RouterConfig) -> None:
    """Raises `ConfigError`."""
    for option, port in (("--port", config.port), ("--admin-port", config.admin_port or 0)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{option}: {port} is not a port", hint="1 to 65535, or 0 for any free one")
    for option, value, least, what in (
        ("--request-timeout", config.request_timeout_s, 0, "seconds, 0 (no limit) or more"),
        ("--max-body-mib", config.max_body_bytes, 1, "1 or more"),
        ("--max-requests", config.max_requests, 1, "1 or more"),
        ("--retries", config.retries, 0, "0 (none) or more"),
        ("--drain-timeout", config.drain_timeout_s, 0, "seconds, 0 or more"),
        ("--ttft-slo", config.ttft_slo_ms, 0, "milliseconds, 0 (no objective) or more"),
        ("--slo-queue", config.slo_queue, 0, "0 or more"),
        ("--session-ttl", config.session_ttl_s, 1, "seconds, 1 or more"),
        ("--prefix-tokens", config.prefix_tokens, 0, "0 (as the engine tells) or more"),
        ("--render-timeout", config.render_timeout_s, 0.001, "seconds, above 0"),
    ):
        if not least <= value < math.inf:
            raise ConfigError(f"{option}: {value:g}", hint=f"expected {what}")
    breaker = config.breaker
    if breaker.failures < 0:
        raise ConfigError(f"--breaker-failures: {breaker.failures}", hint="expected 0 (never opens) or more")
    if not 0 < breaker.open_s < math.inf:
        raise ConfigError(f"--breaker-open: {breaker.open_s:g}", hint="expected seconds, above 0")
