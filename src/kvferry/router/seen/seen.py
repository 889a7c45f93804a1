"""Where a request goes when it has ended: metrics, ring, log line, spans. Off the path of its bytes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from kvferry.observe.histogram import Series
from kvferry.observe.metrics import RouterMetrics
from kvferry.observe.served import ENGINE
from kvferry.router.seen.recent import Recent
from kvferry.router.seen.record import Record
from kvferry.router.seen.told import Told
from kvferry.router.seen.tracing import Span, Tracing

log = logging.getLogger("kvferry.router.requests")


class Seen:
    """Owner: the event loop."""

    def __init__(self, metrics: RouterMetrics, told: Told | None, tracing: Tracing | None) -> None:
        self.recent = Recent()
        self.told = told
        self.tracing = tracing
        self._metrics = metrics.served
        self._numbers = itertools.count(1)
        self._series: dict[str, tuple[Series, Series, Series]] = {}
        self._counters: dict[tuple[str, ...], Counter] = {}
        """Looking a label up in the client library costs ten times what is done with it."""

    def number(self) -> int:
        return next(self._numbers)

    def done(self, record: Record, span: Span | None, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._count(record)
        self.recent.add(record)
        log.log(logging.WARNING if record.failed else logging.INFO, record)
        if span is not None and self.tracing is not None:
            spawn(self.tracing.finish(span, record, self.told))

    def _count(self, record: Record) -> None:
        if record.status == 200 and not record.code:
            ttft, e2e, tpot = self._felt(record.model)
            if record.ttft_ms is not None:
                ttft.observe(record.ttft_ms / 1e3)
            e2e.observe(record.e2e_ms / 1e3)
            if record.tpot_ms is not None:
                tpot.observe(record.tpot_ms / 1e3)
        if record.first_token:
            self._metrics.first_tokens[record.first_token].inc()
        outcome = "failed" if record.failed else "left" if record.code else "ok"
        for leg in record.legs:
            if leg.prefill:
                self._ended(record.mode, outcome, record.code or "none").inc()
                times = {event.event: event.t for event in leg.events}
                if "prefill_done" in times and "first_token" in times:
                    gap = times["first_token"] - times["prefill_done"]
                    self._metrics.handover.labels(record.mode).observe(max(gap, 0.0))

    def _felt(self, model: str | None) -> tuple[Series, Series, Series]:
        metrics = self._metrics
        label = metrics.model(model)
        found = self._series.get(label)
        if found is None:
            ttft, e2e, tpot = (one.labels(label, ENGINE) for one in (metrics.ttft, metrics.e2e, metrics.tpot))
            found = self._series[label] = (ttft, e2e, tpot)
        return found

    def _ended(self, *labels: str) -> Counter:
        found = self._counters.get(labels)
        if found is None:
            found = self._counters[labels] = self._metrics.outcomes.labels(*labels)
        return found

    async def fold(self, mode: str) -> None:
        """What the engines' stories told of transfers since the last time: into the metrics. Reads files."""
        if self.told is not None:
            await asyncio.to_thread(self.told.read)
            for nbytes, seconds in self.told.ended():
                self._metrics.moved.labels(mode).observe(nbytes)
                self._metrics.transfer.labels(mode).observe(seconds)
