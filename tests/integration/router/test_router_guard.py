"""Who may ask what: clients' keys, the admin listener and its key, limits, and what never reaches an engine."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_process import router
from scripted import CHAT, COMPLETIONS, DONE, MODEL, Call, Pair, after, decode_ok, error_of, event, serving
from scripted import stream as stream_of

from kvferry.errors import ConfigError
from kvferry.router.app import ROUTER
from kvferry.router.config import RouterConfig
from kvferry.router.main import Running
from kvferry.router.requests import openai
from kvferry.router.spec import parse_spec

BODY = {"model": MODEL, "prompt": "hi"}
ADMIN = "0123456789abcdef-admin"


def key_file(folder: Path, *keys: str, name: str = "keys") -> str:
    path = folder / name
    path.write_text("# who may ask\n\n" + "".join(f"{key}  # theirs\n" for key in keys))
    path.chmod(0o600)
    return str(path)


# -- clients' keys


async def test_a_client_needs_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(client_key_file=key_file(tmp_path, "sk-one", "sk-two")) as pair:
        for headers in (
            {},
            {"Authorization": "Bearer sk-on"},
            {"Authorization": "sk-one"},
            {"Authorization": "Bearer "},
        ):
            status, answered, raw = await pair.post(COMPLETIONS, BODY, **headers)
            facts = error_of(raw)
            assert status == 401 and answered["WWW-Authenticate"] == "Bearer" and b"sk-o" not in raw
            assert facts["code"] == "invalid_api_key" and facts["type"] == "invalid_request_error"
        for route in ("/v1/models", "/dashboard", "/dashboard/data", "/nowhere"):
            async with pair.session.get(pair.url + route) as response:
                assert response.status == 401, route
        assert pair.p.calls == [] and pair.d.calls == []
        for route in ("/health", "/metrics"):
            async with pair.session.get(pair.url + route) as response:
                assert response.status == 200, route
        for key in ("sk-one", "sk-two"):
            for scheme in ("Bearer", "bearer"):
                assert (await pair.post(COMPLETIONS, BODY, Authorization=f"{scheme} {key}"))[0] == 200
        headers = {"Authorization": "Bearer sk-two"}
        async with pair.session.get(pair.url + "/dashboard/data", headers=headers) as response:
            assert response.status == 404, "with keys for clients the dashboard is on the admin listener only"
    assert not [record for record in caplog.records if "sk-" in record.getMessage()]


async def ask(pair: Pair, head: str, body: bytes = b"") -> tuple[int, dict[str, str], asyncio.StreamReader]:
    """One request by hand: status and headers of the first answer."""
    host, port = pair.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), reader


async def test_the_body_of_one_without_a_key_is_not_kept(tmp_path: Path) -> None:
    async with serving(client_key_file=key_file(tmp_path, "sk-one")) as pair:
        raw = json.dumps(BODY | {"pad": "x" * 4_000_000}).encode()
        status, headers, _ = await ask(pair, f"Content-Length: {len(raw)}", raw)
        assert status == 401 and headers.get("Connection") != "close"
        (connection,) = pair.running._server.open
        assert connection._body == [] and connection.task is None
        status, headers, _ = await ask(pair, f"Content-Length: {len(raw)}\r\nExpect: 100-continue")
        assert status == 401 and headers["Connection"] == "close", "it is not asked for its body"
        shown = f'kvferry_router_request_errors_total{{code="invalid_api_key",route="{COMPLETIONS}",side="router"}} 2.0'
        async with pair.session.get(pair.url + "/metrics") as response:
            assert shown in await response.text()


@pytest.mark.parametrize(("own", "seen"), [("engines-key", "Bearer engines-key"), ("", "Bearer sk-one")])
async def test_whose_key_an_engine_sees(own: str, seen: str, tmp_path: Path) -> None:
    async with serving(client_key_file=key_file(tmp_path, "sk-one"), api_key=own) as pair:
        assert (await pair.post(COMPLETIONS, BODY, Authorization="Bearer sk-one"))[0] == 200
        assert [engine.calls[0].headers["Authorization"] for engine in (pair.p, pair.d)] == [seen, seen]


async def test_the_key_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "sk-old")
    async with serving(client_key_file=path) as pair:
        keys = pair.running._app[ROUTER]._guard._keys
        clock = iter(range(10, 1000, 10))
        keys._clock = lambda: float(next(clock)) + 1e9

        async def status(key: str) -> int:
            return (await pair.post(COMPLETIONS, BODY, Authorization=f"Bearer {key}"))[0]

        assert await status("sk-old") == 200
        key_file(tmp_path, "sk-new-one")
        assert (await status("sk-old"), await status("sk-new-one")) == (401, 200)
        key_file(tmp_path)
        assert await status("sk-new-one") == 200, "a file that can't be used changes nothing"
        assert "holds no key" in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("", 0o600, "holds no key"), ("a b\n", 0o600, "line 1"), ("k\n", 0o644, "chmod 600"), (None, 0, "No such file")],
)
def test_a_key_file_that_cannot_be_used(text: str | None, mode: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        Running(RouterConfig(decode=(parse_spec("127.0.0.1:9"),), mode="colocated", client_key_file=str(path)))
    assert said in str(caught.value) and "--client-key-file" in str(caught.value)


# -- the admin listener


async def test_the_admin_listener_and_its_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, ADMIN)
    async with serving(admin_port=0, admin_key_file=path) as pair:
        drain = {"url": pair.p.url, "timeout_s": 0}
        url, session, bearer = pair.running.admin_url, pair.session, {"Authorization": f"Bearer {ADMIN}"}
        assert url.startswith("http://127.0.0.1:") and url != pair.url
        for method, route in (("GET", "/dashboard/data"), ("GET", "/metrics"), ("POST", "/admin/drain"), ("GET", "/x")):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with session.request(method, url + route, headers=headers, json=drain) as response:
                    assert response.status == 401, route
                    assert error_of(await response.read())["code"] == "invalid_api_key"
        (engine,) = pair.running.pool.engines["prefill"]
        assert not engine.draining
        for route in ("/health", "/dashboard"):
            async with session.get(url + route) as response:
                assert response.status == 200, route
        for route in ("/dashboard/data", "/metrics"):
            async with session.get(url + route, headers=bearer) as response:
                assert response.status == 200, route
        async with session.post(url + "/admin/drain", json=drain, headers=bearer) as response:
            assert (await response.json())["engine"]["draining"] and engine.draining
        async with session.get(url + "/dashboard/data", headers=bearer) as response:
            (shown,) = [one for one in (await response.json())["engines"] if one["role"] == "prefill"]
            assert not shown["takes"] and shown["reason"]
        async with session.get(f"{url}/dashboard/data?key={ADMIN}") as response:
            assert response.status == 401, "never a key in a URL"
        for route in ("/dashboard", "/dashboard/data", "/admin/drain"):
            async with session.get(pair.url + route, headers=bearer) as response:
                assert response.status == 404, "the clients' listener has none of it"


async def test_without_a_key_it_is_for_this_machine() -> None:
    async with serving(admin_port=0) as pair:
        drain, (engine,) = {"url": pair.p.url, "timeout_s": 0}, pair.running.pool.engines["prefill"]
        url, session = pair.running.admin_url + "/admin/drain", pair.session
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
            async with session.post(url, json=drain, headers=headers) as response:
                assert response.status == 403
        assert not engine.draining
        same = {"Origin": pair.running.admin_url}
        async with session.post(url, json=drain, headers=same) as response:
            assert response.status == 200 and engine.draining


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"admin_port": 0, "admin_host": "0.0.0.0"}, "--admin-key-file"),
        ({"admin_key_file": "keys"}, "--admin-port"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"ssl_ca_certs": "k"}, "--ssl-certfile"),
        ({"max_requests": 0}, "--max-requests"),
    ],
)
def test_less_guarded_than_it_looks(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(decode=(), **config).check()
    assert said in str(caught.value)


async def test_the_command_says_where_it_listens(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--decode", "127.0.0.1:9", "--mode", "colocated", "--log-format", "json")
    async with router(*arguments, "--admin-port", "0") as process:
        assert process.stdout is not None and process.stderr is not None
        async with asyncio.timeout(20):
            lines = [(await process.stdout.readline()).decode() for _ in range(2)]
            logged = json.loads(await process.stderr.readline())
        assert lines[0].startswith("listening http://127.0.0.1:") and lines[1].startswith("admin http://127.0.0.1:")
        assert logged["event"] == "message" and "127.0.0.1:9" in logged["message"] and logged["level"] == "WARNING"
        async with aiohttp.ClientSession() as session, session.get(lines[1].split()[1] + "/dashboard/data") as response:
            assert response.status == 200
    short = key_file(tmp_path, "short")
    async with router(*arguments, "--admin-port", "0", "--admin-key-file", short) as process:
        async with asyncio.timeout(20):
            out, errors = await process.communicate()
        assert process.returncode == 1 and out == b"" and errors.count(b"\n") == 1
        assert b"--admin-key-file" in errors and b"shorter than 16" in errors


# -- limits, targets, parameters


@pytest.mark.parametrize("headers", [{"X-Long": "x" * 300_000}, {f"X-{n}": "x" for n in range(257)}])
async def test_too_much_header_is_one_clear_431(headers: dict[str, str]) -> None:
    async with serving() as pair:
        async with pair.session.post(pair.url + COMPLETIONS, json=BODY, headers=headers) as response:
            facts = error_of(await response.read())
            assert response.status == 431 and facts["code"] == "headers_too_large" and "header" in facts["message"]
        assert (await pair.complete())[0] == 200 and len(pair.d.calls) == 1


async def test_above_max_requests_says_why() -> None:
    gate = asyncio.Event()
    async with serving(max_requests=1) as pair:
        pair.d.script = after(gate, decode_ok)
        first = asyncio.create_task(pair.complete())
        await pair.d.call()
        status, headers, raw = await pair.complete()
        gate.set()
        assert status == 429 and headers["x-kvferry-reason"] == "too_many_requests" == error_of(raw)["code"]
        assert headers["Retry-After"] == "1" and (await first)[0] == 200


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_redirect_leads_nowhere(side: str) -> None:
    """Only engines of the pool are connected to, whatever one of them answers."""
    async with serving() as other, serving() as pair:

        async def elsewhere(call: Call) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": other.d.url + COMPLETIONS})

        getattr(pair, side).script = elsewhere
        status, headers, raw = await pair.complete()
        assert status == 502 and "Location" not in headers and "307" in error_of(raw)["message"]
        assert other.p.calls == [] and other.d.calls == []


ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3]},
}
EVIL = {"remote_host": "10.0.0.9", "do_remote_prefill": True}
BOTH = {"kv_transfer_params": EVIL, "ec_transfer_params": EVIL}
INNER = {"extra_args": BOTH | {"mine": 1}, **BOTH, "vllm_xargs": BOTH}
NAMED = BOTH | {"vllm_xargs": BOTH | {"mine": 1}, "sampling_params": INNER, "extra_args": INNER}


def test_every_route_that_generates_is_asked() -> None:
    assert set(ASKED) == set(openai.ROUTES)


@pytest.mark.parametrize("route", ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_transfer_parameters_of_a_client_reach_no_engine(route: str, stream: bool) -> None:
    async with serving() as pair:
        assert (await pair.post(route, {"model": MODEL, "stream": stream} | ASKED[route] | NAMED))[0] == 200
        for engine in (pair.p, pair.d):
            (call,) = engine.calls
            assert b"10.0.0.9" not in call.raw and b"ec_transfer_params" not in call.raw
            assert call.raw.count(b"kv_transfer_params") == 1, "the router's own"
            assert call.body["vllm_xargs"] == {"mine": 1} and call.body["extra_args"]["extra_args"] == {"mine": 1}


@pytest.mark.parametrize("route", ["/tokenize", "/v1/embeddings", "/v1/chat/completions/render"])
async def test_nor_do_they_where_one_engine_answers(route: str) -> None:
    async with serving() as pair:
        await pair.post(route, {"model": MODEL, "prompt": "hi"} | NAMED)
        (call,) = pair.d.calls
        assert b"10.0.0.9" not in call.raw and b"transfer_params" not in call.raw and call.body["prompt"] == "hi"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be", "utf-8-sig"])
@pytest.mark.parametrize("route", [COMPLETIONS, "/tokenize"])
async def test_nor_in_another_encoding(route: str, encoding: str) -> None:
    said = json.dumps({"model": MODEL, "prompt": "hi"} | NAMED)
    deep = said[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"
    async with serving() as pair:
        async with pair.session.post(pair.url + route, data=said.encode(encoding)) as response:
            assert response.status == 200
        asked = [*pair.p.calls, *pair.d.calls]
        assert asked and not any("10.0.0.9" in json.dumps(call.body) for call in asked)
        async with pair.session.post(pair.url + route, data=deep.encode(encoding)) as response:
            assert (response.status, error_of(await response.read())["code"]) == (400, "invalid_json")
        assert [*pair.p.calls, *pair.d.calls] == asked


@pytest.mark.parametrize("target", ["/v1/%63ompletions", "http://x/v1/completions"])
async def test_no_spelling_of_a_route_leads_past_its_checks(target: str) -> None:
    async with serving() as pair:
        reader, writer = await pair.raw(BODY, route=target)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"invalid_path" in answer
        assert not pair.d.calls and not pair.p.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_no_name_of_a_model_breaks_the_metrics(stream: bool) -> None:
    async with serving() as pair:
        for model in ("\ud800", "\x00", "a\nb", "m" * 100_000):
            assert (await pair.complete(model=model, stream=stream))[0] == 200
        async with pair.session.get(pair.url + "/metrics") as response:
            text = await response.text()
        assert response.status == 200 and len(text) < 200_000 and r'model_name="\\ud800"' in text
        async with pair.session.get(pair.url + "/dashboard/data") as response:
            assert response.status == 200


async def test_a_passed_on_answer_that_breaks_is_not_filled_with_another(caplog: pytest.LogCaptureFixture) -> None:
    async def short(call: Call) -> web.StreamResponse:
        assert call.request.transport is not None
        call.request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\nabc")
        await asyncio.sleep(0.02)
        call.request.transport.abort()
        return web.Response()

    async with serving() as pair:
        pair.d.script = short
        reader, writer = await pair.raw(BODY, route="/tokenize")
        with pytest.raises(ConnectionResetError):
            got = b""
            while piece := await reader.read(65536):
                got += piece
            assert got.endswith(b"\r\n\r\nabc"), got
            raise ConnectionResetError
        writer.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_nesting_without_end_is_an_engines_error(side: str) -> None:
    async def deep(call: Call) -> web.StreamResponse:
        return web.Response(body=b"[" * 100_000, content_type="application/json")

    async def deep_stream(call: Call) -> web.StreamResponse:
        return await stream_of(call, [event("a"), b'data: {"usage": ' + b"[" * 100_000 + b"}\n\n", DONE])

    async with serving() as pair:
        if side == "prefill":
            pair.p.script = deep
            status, _, raw = await pair.complete()
            assert (status, error_of(raw)["side"]) == (502, "prefill")
        else:
            pair.d.script = deep_stream
            status, _, raw = await pair.complete(stream=True, stream_options={"include_usage": True})
            assert status == 200 and raw.endswith(DONE), "as it came"


async def test_what_a_user_writes_is_no_parameter() -> None:
    said = {"role": "user", "content": "what is kv_transfer_params?"}
    async with serving() as pair:
        assert (await pair.post(CHAT, {"model": MODEL, "messages": [said]}))[0] == 200
        assert pair.d.calls[0].body["messages"] == [said], "what a user writes is no parameter"


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models"])
async def test_the_routers_own_routes_ask_no_engine(path: str) -> None:
    async with serving() as pair:
        async with pair.session.options(pair.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET")
        assert pair.d.calls == pair.p.calls == []
