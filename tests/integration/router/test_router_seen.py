"""What is seen of requests: metrics under vLLM's names, the log line, the ring of the last, the dashboard's data."""

from __future__ import annotations

import asyncio
import json
import logging
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    COMPLETIONS,
    DONE,
    MODEL,
    Call,
    Engine,
    Pair,
    begin_stream,
    decode_ok,
    event,
    hang,
    refuse,
    serving,
    slam,
    usage,
)

from kvferry.router.app import ROUTER
from kvferry.router.seen.logs import JsonFormatter
from kvferry.router.seen.record import Record

MARKUP = "<img src=x onerror=alert(1)>"


async def told(call: Call) -> Any:
    """Three tokens, each by itself, and the usage, as vLLM sends it."""
    response = await begin_stream(call)
    for piece in (event("a"), event("b"), event("c")):
        await response.write(piece)
        await asyncio.sleep(0.01)
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage(7, 3)})}\n\n".encode() + DONE)
    await response.write_eof()
    return response


async def samples(pair: Pair) -> dict[str, float]:
    async with pair.session.get(pair.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def data(pair: Pair, after: int = 0) -> dict[str, Any]:
    async with pair.session.get(f"{pair.url}/dashboard/data?after={after}") as response:
        assert response.status == 200
        return json.loads(await response.read())


async def test_latencies_have_vllms_names() -> None:
    async with serving() as pair:
        pair.d.script = told
        assert (await pair.complete(stream=True))[0] == 200
        pair.d.script = decode_ok
        assert (await pair.complete())[0] == 200
        pair.p.script = refuse(400, {"error": {"message": "no", "code": 400}})
        assert (await pair.complete(stream=True))[0] == 400
        shown = await samples(pair)
    labels = f'{{engine="router",model_name="{MODEL}"}}'
    for name, count in (
        ("time_to_first_token_seconds", 1),
        ("request_time_per_output_token_seconds", 1),
        ("e2e_request_latency_seconds", 2),
        ("inter_token_latency_seconds", 3),  # a-b, b-c, c-usage
    ):
        assert shown[f"vllm:{name}_count{labels}"] == count, name
    gaps = shown[f"vllm:inter_token_latency_seconds_sum{labels}"]
    assert 0.02 <= gaps <= shown[f"vllm:e2e_request_latency_seconds_sum{labels}"]
    outcomes = {key: value for key, value in shown.items() if key.startswith("kvferry_router_pd_outcomes_total")}
    assert outcomes == {
        'kvferry_router_pd_outcomes_total{mode="push",outcome="ok",reason="none"}': 2,
        'kvferry_router_pd_outcomes_total{mode="push",outcome="failed",reason="engine_error"}': 1,
    }
    assert shown['kvferry_router_pd_handover_seconds_count{mode="push"}'] == 2


async def test_model_labels_are_bounded() -> None:
    async with serving() as pair:
        metrics = pair.running._app[ROUTER].services.metrics.served
        names = {metrics.model(f"m{number}") for number in range(1000)}
        assert len(names) == 101 and "other" in names and metrics.model("m0") == "m0"


async def test_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router.requests")
    async with serving() as pair:
        pair.d.script = told
        _, headers, _ = await pair.complete(stream=True)
        pair.d.script = slam
        await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "x"}, X_Request_Id="my id")
        lines = [record for record in caplog.records if record.name == "kvferry.router.requests"]
        assert len(lines) == 2
        facts = json.loads(JsonFormatter().format(lines[0]))
        expected = {
            "event": "request",
            "route": COMPLETIONS,
            "status": 200,
            "model": MODEL,
            "stream": True,
            "prefill": pair.p.url,
            "decode": pair.d.url,
            "transfer_id": headers["x-kvferry-transfer-id"],
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "retries": 0,
        }
        assert {key: facts.get(key) for key in expected} == expected
        assert 0 < facts["ttft_ms"] < facts["e2e_ms"]
        text = lines[0].getMessage()
        assert text.startswith(f"{COMPLETIONS} status=200 model={MODEL} stream=True prefill={pair.p.url}")
        assert text.endswith("tokens=7+3") and "\n" not in text
        failed = json.loads(JsonFormatter().format(lines[1]))
        assert failed["status"] == 502 and failed["error"] == "engine_error" and failed["side"] == "decode"
        assert pair.d.url in failed["reason"] and failed["request_id"] == "my id"
        assert 'request_id="my id"' in lines[1].getMessage()


async def test_a_retry_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router.requests")
    bad, good = Engine("decode"), Engine("decode")
    bad.script = refuse(503, {"error": {"message": "full", "code": 503}})
    async with serving(decode=[bad, good], retries=2) as pair:
        async with asyncio.timeout(5):
            while not all(engine.ready for engine in pair.running.pool.all()):
                await pair.running.pool.change()
        for _ in range(2):
            assert (await pair.complete())[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.router.requests"]
    assert sorted("retries=1" in line for line in lines) == [False, True] and good.url in lines[0]


async def test_a_model_name_forges_no_field(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router.requests")
    async with serving() as pair:
        await pair.complete(model="x\nstatus=404 model=y" + "z" * 5000)
    line = caplog.records[-1].getMessage()
    assert "\n" not in line and line.count(" status=") == 1 and len(line) < 2000
    assert 'model="x\\nstatus=404 model=y' in line


async def test_a_client_that_leaves_is_told_apart() -> None:
    async with serving() as pair:
        pair.d.script = hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "x"})
        await pair.d.call()
        writer.close()
        recent = pair.running._app[ROUTER].services.seen.recent
        async with asyncio.timeout(5):
            while not recent.since(0):
                await asyncio.sleep(0.01)
        (record,) = recent.since(0)
        assert recent.errors == []
        assert (record.code, record.status) == ("client_left", 499)
        assert (await samples(pair))[
            'kvferry_router_pd_outcomes_total{mode="push",outcome="left",reason="client_left"}'
        ] == 1


async def test_the_dashboards_data(tmp_path: Path) -> None:
    async with serving(story_dir=str(tmp_path)) as pair:
        pair.d.script = told
        _, headers, _ = await pair.complete(stream=True)
        transfer_id = headers["x-kvferry-transfer-id"]
        # As an engine with the same `story_dir` tells it.
        first = (await data(pair))["requests"][0]["legs"][0]["events"]
        times = {name: t for name, _, t in first}
        lines = [
            {"t": times["dispatched"] + 0.001, "event": "registered", "side": "decode"},
            {"t": times["dispatched"] + 0.002, "event": "posted", "side": "prefill", "nbytes": 1000},
            {"t": times["dispatched"] + 0.012, "event": "landed", "side": "decode"},
        ]
        text = "".join(json.dumps(line | {"transfer_id": transfer_id, "rank": 0}) + "\n" for line in lines)
        (tmp_path / "decode-1.jsonl").write_text(text + '{"t": 1, "transfer_id": "cut')
        facts = await data(pair)
        (request,) = facts["requests"]
        assert request["number"] == 1 and request["model"] == MODEL and request["status"] == 200
        assert (request["prompt_tokens"], request["completion_tokens"]) == (7, 3)
        events = [name for name, _, _ in request["legs"][0]["events"]]
        assert events[0] == "received" and events[-1] == "last_token"
        by_engines = [one for one in request["legs"][0]["events"] if one[1] != "router"]
        assert [one[:2] for one in by_engines] == [[line["event"], line["side"]] for line in lines]
        assert request["legs"][0]["nbytes"] == 1000
        assert [one[2] for one in request["legs"][0]["events"]] == sorted(
            one[2] for one in request["legs"][0]["events"]
        )
        assert {(one["role"], one["url"], one["ready"]) for one in facts["engines"]} == {
            ("prefill", pair.p.url, True),
            ("decode", pair.d.url, True),
        }
        assert facts["missing"] == [] and ["first token", "first_token", ["landed"]] in facts["steps"]
        shown = await samples(pair)
        assert shown['kvferry_router_pd_transfer_bytes_sum{mode="push"}'] == 1000
        assert shown['kvferry_router_pd_transfer_seconds_sum{mode="push"}'] == pytest.approx(0.01, abs=1e-5)
        assert (await data(pair, after=1))["requests"] == []
        assert (await samples(pair))['kvferry_router_pd_transfer_bytes_count{mode="push"}'] == 1, "counted once"


async def test_the_ring_is_bounded_and_errors_outlive_it() -> None:
    async with serving() as pair:
        good, pair.p.script = pair.p.script, refuse(404, {"error": {"message": MARKUP, "code": 404}})
        await pair.complete(model=MARKUP)
        pair.p.script = good
        for _ in range(3):
            await asyncio.gather(*(pair.complete() for _ in range(70)))
        facts = await data(pair)
        assert len(facts["requests"]) == 200 and facts["requests"][0]["number"] == 211
        (error,) = facts["errors"]
        assert error["model"] == MARKUP and error["code"] == "engine_error" and MARKUP not in error["reason"]
        async with pair.session.get(pair.url + "/dashboard/data?after=x") as response:
            assert response.status == 400


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with serving() as pair, pair.session.get(pair.url + "/dashboard") as response:
        text, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert response.content_type == "text/html" and response.headers["X-Frame-Options"] == "DENY"
    tags = Page(text).tags
    assert [name for name, _ in tags].count("script") == 1
    links = {value for _, attrs in tags for key, value in attrs.items() if key in ("src", "href", "action")}
    assert links == {"data:,"} and "http" not in text.replace("https?:", "")
    for written in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert written not in text, "what comes from outside goes in as text"
    assert not [key for _, attrs in tags for key in attrs if key.startswith("on")]
    assert "script-src 'sha256-" in policy and "default-src 'none'" in policy and "'unsafe-eval'" not in policy


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1:80"])
async def test_a_name_that_leads_here_gets_no_data(host: str) -> None:
    async with serving() as pair:
        url = pair.url + "/dashboard/data"
        async with pair.session.get(url, headers={"Host": host}) as response:
            assert response.status == 403 and b"host_not_allowed" in await response.read()
        async with pair.session.get(url, headers={"Origin": f"http://{host}"}) as response:
            assert response.status == 403 and b"origin_not_allowed" in await response.read()


def test_text_of_a_record_is_words() -> None:
    record = Record(number=1, t=0.0, route="/r", mode="push", status=503, e2e_ms=1.5, code="no_engine", reason='a "b"')
    assert str(record) == '/r status=503 e2e_ms=1.5 error=no_engine reason="a \\"b\\""'
