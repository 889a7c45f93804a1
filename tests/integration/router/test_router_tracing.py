"""Spans of a request, and `traceparent` to both legs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import COMPLETIONS, MODEL, serving, slam

from kvferry.errors import ConfigError
from kvferry.router import app
from kvferry.router.seen import tracing
from kvferry.router.seen.traceparent import parse

pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk: pip install 'kvferry[otel]'")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": MODEL, "prompt": "hi", "stream": True}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """The spans that came out, by name, once the router has stopped."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(app, "tracing_to", lambda endpoint: tracing.Tracing(exporter) if endpoint else None)
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


async def test_off_it_goes_through_untouched(exported: Callable[[], dict[str, Any]]) -> None:
    odd = "00-not-one"
    async with serving() as pair:
        await pair.post(COMPLETIONS, BODY, traceparent=odd, tracestate="a=b")
        await pair.post(COMPLETIONS, BODY)
        for engine in (pair.p, pair.d):
            first, second = engine.calls
            assert (first.headers["traceparent"], first.headers["tracestate"]) == (odd, "a=b")
            assert "traceparent" not in second.headers
    assert exported() == {}


async def test_spans_of_a_client_that_traces(exported: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    async with serving(otlp_traces_endpoint="x", story_dir=str(tmp_path)) as pair:
        sent = f"00-{TRACE}-{SPAN}-01"
        _, headers, _ = await pair.post(COMPLETIONS, BODY, traceparent=sent, X_Request_Id="r1")
        transfer_id = headers["x-kvferry-transfer-id"]
        seen = {engine.calls[0].headers["traceparent"] for engine in (pair.p, pair.d)}
    spans = exported()
    assert set(spans) == {"route", "prefill", "transfer", "decode"}
    route = spans["route"]
    (header,) = seen
    parent = parse(header)
    assert parent is not None and parent.sampled and parent.trace_id == int(TRACE, 16)
    assert parent.span_id == route.context.span_id and route.parent.span_id == int(SPAN, 16)
    for name in ("prefill", "transfer", "decode"):
        span = spans[name]
        assert span.parent.span_id == route.context.span_id and span.context.trace_id == int(TRACE, 16)
        assert route.start_time <= span.start_time <= span.end_time <= route.end_time + 1_000_000, name
        assert span.attributes["kvferry.transfer_id"] == transfer_id
    assert spans["prefill"].attributes["kvferry.engine"] == pair.p.url
    assert route.attributes["kvferry.request_id"] == "r1" and route.attributes["http.response.status_code"] == 200


async def test_times_of_the_engines_come_from_their_stories(
    exported: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    async with serving(otlp_traces_endpoint="x", story_dir=str(tmp_path)) as pair:
        from scripted import Call, decode_ok

        async def telling(call: Call) -> Any:
            lines = [("registered", "decode", 1.0), ("matched", "prefill", 2.0), ("landed", "decode", 2.5)]
            facts = [
                {"transfer_id": call.params["transfer_id"], "event": event, "side": side, "t": t, "rank": 0}
                for event, side, t in lines
            ]
            facts.append(facts[1] | {"event": "posted", "nbytes": 4096})
            (tmp_path / "decode-1.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
            return await decode_ok(call)

        pair.d.script = telling
        await pair.post(COMPLETIONS, BODY)
    spans = exported()
    assert set(spans) == {"route", "prefill", "register", "transfer", "decode"}
    transfer = spans["transfer"]
    assert (transfer.start_time, transfer.end_time) == (2_000_000_000, 2_500_000_000)
    assert transfer.attributes["kvferry.bytes"] == 4096 and transfer.attributes["kvferry.seen_by"] == "decode"


async def test_a_new_trace_a_failure_and_one_that_is_not_sampled(exported: Callable[[], dict[str, Any]]) -> None:
    async with serving(otlp_traces_endpoint="x") as pair:
        await pair.post(COMPLETIONS, BODY, traceparent=f"00-{TRACE}-{SPAN}-00")
        left_out = parse(pair.d.calls[0].headers["traceparent"])
        pair.d.script = slam
        await pair.post(COMPLETIONS, BODY, traceparent="00-nonsense")
        made = parse(pair.d.calls[1].headers["traceparent"])
    assert left_out is not None and not left_out.sampled and left_out.trace_id == int(TRACE, 16)
    assert made is not None and made.sampled and made.trace_id != int(TRACE, 16)
    route = exported()["route"]
    assert route.context.trace_id == made.trace_id and route.parent is None
    assert route.status.status_code.name == "ERROR" and pair.d.url in route.status.description
    assert route.attributes["kvferry.error"] == "engine_error"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "carrier-pigeon")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        tracing.tracing_to("http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"kvferry\[otel\]"):
        tracing.tracing_to("http://127.0.0.1:9")
    assert tracing.tracing_to("") is None
