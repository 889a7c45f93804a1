"""OpenTelemetry spans of a request: `route` around `prefill`, `register`, `transfer` and `decode`. Imported late.

A request costs one span object and one header while it runs; the others are made when it has ended, from times that
were taken anyway. `register` and the exact `transfer` only the engines saw: their times come from the story files, if
the router shares `story_dir` with them. Without those `transfer` is what the router saw, P's reply to first token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry import __version__
from kvferry.errors import ConfigError
from kvferry.router.seen import traceparent
from kvferry.router.seen.record import Event, Leg, Record
from kvferry.router.seen.traceparent import TraceParent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

    from kvferry.router.seen.told import Told

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
FLUSH_S = 3.0
"""A stop waits so long for a collector to take what is left."""

Period = tuple[str, float, float, str]
"""Name, begin and end (wall-clock seconds), and who saw it."""


class Span:
    """The running `route` span of one request."""

    def __init__(self, span: OtelSpan) -> None:
        self.span = span
        about = span.get_span_context()
        self.header = str(TraceParent(about.trace_id, about.span_id, about.trace_flags.sampled))


class Tracing:
    """Owner: the event loop, but for the exporter's own thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace = trace
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "kvferry-router")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvferry.router", __version__)

    def begin(self, headers: Mapping[str, str], received: float) -> Span:
        """`received`: wall-clock seconds."""
        trace, context = self._trace, None
        parent = traceparent.parse(headers.get(traceparent.HEADER))
        if parent is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
            about = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(about))
        return Span(self._tracer.start_span("route", context, kind=trace.SpanKind.SERVER, start_time=_ns(received)))

    async def finish(self, span: Span, record: Record, told: Told | None) -> None:
        """End it, with its children. Reads the engines' stories, where there are some."""
        if told is not None and span.span.is_recording():
            await asyncio.to_thread(told.read)
        trace, route = self._trace, span.span
        for key, value in record.facts().items():
            route.set_attribute(f"kvferry.{key}", value)
        route.set_attribute("http.route", record.route)
        route.set_attribute("http.response.status_code", record.status)
        if record.code:
            route.set_status(trace.Status(trace.StatusCode.ERROR, record.reason))
        context = trace.set_span_in_context(route)
        for leg in record.legs:
            engines = [] if told is None else told.events(leg.transfer_id)
            for name, begun, ended, side in periods(leg, engines):
                child = self._tracer.start_span(
                    name, context, kind=trace.SpanKind.CLIENT, start_time=_ns(begun), attributes=_about(leg, name, side)
                )
                if told is not None and name == "transfer" and (nbytes := told.moved(leg.transfer_id)):
                    child.set_attribute("kvferry.bytes", nbytes)
                child.end(_ns(ended))
        route.end(_ns(record.t + record.e2e_ms / 1e3))

    async def close(self) -> None:
        """What is left goes out, if the collector takes it soon."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is gone
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=send, name="spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await done.wait()


def periods(leg: Leg, engines: list[Event]) -> list[Period]:
    """The children of `route` that the events tell of. `engines`: what those said."""
    router: dict[str, float] = {}
    for event in leg.events:
        router.setdefault(event.event, event.t)
    first: dict[str, tuple[float, str]] = {}
    last: dict[str, tuple[float, str]] = {}
    for event in engines:
        first.setdefault(event.event, (event.t, event.side))
        last[event.event] = (event.t, event.side)
    asked = router.get("bound", router.get("dispatched"))
    found: list[Period] = []
    if leg.prefill and "dispatched" in router and "prefill_done" in router:
        found.append(("prefill", router["dispatched"], router["prefill_done"], "router"))
    if leg.prefill and asked is not None and "registered" in first:
        found.append(("register", asked, *last["registered"]))
    begun = first.get("granted") or first.get("matched")
    if begun and "landed" in last:
        found.append(("transfer", begun[0], *last["landed"]))
    elif "prefill_done" in router and "first_token" in router:
        found.append(("transfer", router["prefill_done"], router["first_token"], "router"))
    if "first_token" in router and (ended := router.get("last_token", router.get("failed"))):
        found.append(("decode", router["first_token"], ended, "router"))
    return [(name, begin, max(begin, end), side) for name, begin, end, side in found]


def tracing_to(endpoint: str) -> Tracing | None:
    """None without an endpoint. Raises `ConfigError` where OpenTelemetry isn't installed."""
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        hint = "expected a collector's URL, for example http://127.0.0.1:4317"
        raise ConfigError(f"--otlp-traces-endpoint: {endpoint!r}", hint=hint)
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    exporter: Any
    try:
        import opentelemetry.sdk.trace  # noqa: F401

        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            exporter = Grpc(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            exporter = Http(endpoint=endpoint)
        else:
            raise ConfigError(f"${PROTOCOL_VARIABLE}: {protocol!r}", hint="expected grpc or http/protobuf")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint: {error.name} is not installed", hint="pip install 'kvferry[otel]'"
        ) from None
    return Tracing(exporter)


def _about(leg: Leg, name: str, side: str) -> dict[str, str]:
    engine = leg.prefill if name == "prefill" else leg.decode
    return {"kvferry.transfer_id": leg.transfer_id, "kvferry.engine": engine, "kvferry.seen_by": side}


def _ns(t: float) -> int:
    return int(t * 1e9)
