"""Tries of one part of a request until one has an answer: other engines, each time a transfer of its own.

Only before the first byte: what `open_part` gives back goes to the client, and from then on a failure is an error. The
try before is cancelled on D and abandoned at P before the next begins, and as no two share a transfer
id, nothing of it that lands late can meet the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvferry.errors import PeerUnreachable
from kvferry.router.dispatch.dispatch import Answer, Exchange
from kvferry.router.engines.budget import backoff_s
from kvferry.router.engines.faults import may_retry, to_avoid
from kvferry.router.replies import LegFailed, Refusal, without_frames
from kvferry.router.services import Services

log = logging.getLogger("kvferry.router")

HEAD_START_S = 0.5
"""The next try waits so long for P's word that it let go of the last: P answers in a millisecond, if it lives."""
Again = Callable[[frozenset[str]], Exchange]


async def open_part(services: Services, exchanges: list[Exchange], index: int, again: Again) -> Answer:
    """Open `exchanges[index]`, or another in its place. `again`: makes one, on other engines than those, where there
    are any; raises `Refusal` if there is none at all. Raises the last try's `LegFailed`, or `Refusal`.
    """
    config, metrics = services.config, services.metrics
    services.retry_budget.request(time.monotonic())
    avoid: frozenset[str] = frozenset()
    tries = 1
    while True:
        exchange = exchanges[index]
        try:
            return await exchange.open()
        except LegFailed as error:
            failed = error
            without_frames(failed)
        if not may_retry(failed) or config.retries == 0:
            raise failed
        if tries > config.retries:
            metrics.retries_exhausted.labels("tries").inc()
            raise failed
        if not services.retry_budget.take(time.monotonic()):
            metrics.retries_exhausted.labels("budget").inc()
            raise failed
        avoid |= to_avoid(failed, exchange.urls)
        exchange.close(failure=str(failed))
        gone = failed.side == "prefill" and failed.code == PeerUnreachable.code
        if not gone:
            await exchange.let_go(HEAD_START_S)
        await asyncio.sleep(backoff_s(config.retry, tries))
        try:
            exchanges[index] = again(avoid)
        except Refusal as refusal:
            if failed.code == PeerUnreachable.code:
                raise refusal from failed
            raise failed from None
        tries += 1
        exchange.note("tried_again", next=exchanges[index].transfer_id)
        exchanges[index].note("tried_again", last=exchange.transfer_id, code=failed.code)
        metrics.retries.labels(failed.side, failed.code).inc()
        log.warning("%s tried again as %s: %s", exchange.transfer_id, exchanges[index].transfer_id, failed)
