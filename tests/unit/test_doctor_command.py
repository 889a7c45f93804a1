"""The command's arguments, its HTTP questions, and one report over an engine that only has HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from kvferry.cli import main
from kvferry.doctor.reach import ask
from kvferry.doctor.target import parse_target


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--decode", "h:1"], "--prefill: at least one engine is needed"),
        (["--prefill", "h:1"], "--decode: at least one engine is needed"),
        (["--prefill", "h:1", "--decode", "h"], "--decode: expected HOST:PORT, got 'h'"),
        (["--prefill", "h:1", "--decode", "h:2", "--prompt-tokens", "0"], "--prompt-tokens: 0"),
        (["--prefill", "h:1", "--decode", "h:2", "--ttft", "-1"], "--ttft: -1"),
    ],
)
def test_bad_arguments_are_one_line_and_no_1(arguments, says, capsys):
    assert main(["doctor", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvferry: error: ") and says in line


async def serving(routes):
    app = web.Application()
    for path, (status, body) in routes.items():

        async def answer(_, status=status, body=body):
            return web.json_response(body, status=status)

        app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, site._server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("routes", "status", "says"),
    [
        ({"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "m"}]})}, "ok", "healthy, serves m"),
        ({"/health": (503, {})}, "FAIL", "/health answered 503"),
        ({"/health": (200, {}), "/v1/models": (401, {})}, "warn", "/v1/models answered 401"),
        ({"/health": (200, {}), "/v1/models": (200, {"x": 1})}, "warn", "no list of models"),
    ],
)
async def test_http(routes, status, says):
    runner, port = await serving(routes)
    try:
        target = parse_target(f"http://127.0.0.1:{port},side_channel=127.0.0.1:1", "prefill")
        engine, (http, side) = await ask(target, "")
    finally:
        await runner.cleanup()
    assert (http.check, http.status) == ("http", status) and says in http.said
    assert bool(http.todo) == (status != "ok")
    assert engine.models == (["m"] if status == "ok" else None)
    assert (side.check, side.status) == ("side channel", "FAIL") and "nothing listens there" in side.said


def test_nothing_there_is_broken_and_told_in_both_forms(tmp_path, capsys):
    file = tmp_path / "out.json"
    where = "http://127.0.0.1:1,side_channel=127.0.0.1:1"
    assert main(["doctor", "--prefill", where, "--decode", "127.0.0.1:1", "--json", str(file)]) == 2
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "exit 2: broken: see what is marked FAIL"
    report = json.loads(file.read_text())
    assert [(one["check"], one["status"]) for one in report["checks"]] == [
        ("http", "FAIL"),
        ("side channel", "FAIL"),
        ("side channel", "FAIL"),
    ]
    assert all(one["said"] in out and one["todo"] in out for one in report["checks"])
    assert report["pairs"] == [] and report["exit_code"] == 2


def test_a_json_file_that_cannot_be_written_is_said(tmp_path, capsys):
    where = "127.0.0.1:1"
    assert main(["doctor", "--prefill", where, "--decode", where, "--json", str(tmp_path / "no" / "x")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


async def test_a_listener_that_is_no_side_channel_ends_in_time(monkeypatch):
    monkeypatch.setattr("kvferry.doctor.reach.LIMIT_S", 0.2)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, (side,) = await ask(parse_target(f"127.0.0.1:{port}", "decode"), "")
    assert side.status == "FAIL" and "takes connections but does not answer" in side.said
    assert "not the HTTP port" in side.todo
