"""`kvferry bench render`: the scripts, what is compared, the counted connection, sums and tables. No server starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench import render_bench, render_hosts
from kvferry.bench.render_bench import Job, Measured, Point, facts_of
from kvferry.bench.render_command import text
from kvferry.bench.render_http import Line
from kvferry.bench.render_prompts import Renders
from kvferry.bench.render_said import Piece, finish_of, joined, pieces_of
from kvferry.bench.render_script import CALLS, chat, prompt_text, script
from kvferry.bench.render_servers import OURS, PEER, Server, clock_of, command
from kvferry.bench.render_stream import Cost, Stateless
from kvferry.cli import main
from kvferry.errors import ConfigError, EngineError


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


LETTERS = Letters()


def job(**settings: Any) -> Job:
    made = {
        "model": Path("/m"),
        "output_tokens": (100, 400),
        "parser": "tool",
        "tool_parser": "qwen3_xml",
        "reasoning_parser": "qwen3",
        "prompt_tokens": 900,
        "renders": 0,
        "at_once": 1,
        "rounds": 1,
        "whole": 100,
        "samples": 4,
        "seed": 0,
    }
    return Job(**(made | settings))


# -- the scripts


@pytest.mark.parametrize("name", CALLS)
def test_a_script_with_tools_is_text_then_calls(name: str) -> None:
    made = script(LETTERS, "tool", name, 2000, 7)
    said = LETTERS.decode(made.ids)
    assert len(made.ids) == 2000 and made.calls == said.count("<tool_call>") > 5
    assert not said.startswith("<tool_call>")
    assert script(LETTERS, "tool", name, 2000, 7) == made != script(LETTERS, "tool", name, 2000, 8)


def test_a_script_with_reasoning_thinks_for_half_of_it() -> None:
    said = LETTERS.decode(script(LETTERS, "reasoning", "", 2000, 7).ids)
    thought, _, rest = said.removeprefix("<think>\n").partition("</think>")
    assert said.startswith("<think>") and 900 < len(thought) < 1300 and len(rest) > 600
    assert script(LETTERS, "none", "", 500, 7).calls == 0


def test_a_tool_parser_whose_calls_nobody_can_write() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser: 'pythonic' \(expected one of qwen3_xml"):
        script(LETTERS, "tool", "pythonic", 100, 0)


def test_prompts_differ_from_the_first_word_on() -> None:
    one, other = prompt_text(LETTERS, 300, 1), prompt_text(LETTERS, 300, 2)
    assert len(one) == len(other) == 300 and one.split()[0] != other.split()[0]
    assert "tools" in chat(one, 8, "tool") and "tools" not in chat(one, 8, "none")


# -- what is compared


def event(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish}]})}\n\n"


def test_two_ways_to_cut_a_stream_say_the_same() -> None:
    def call(arguments: str, name: str | None = None) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "id": "random", "function": {"name": name, "arguments": arguments}}]}

    one = event({"role": "assistant", "content": "a"}) + event({"content": "b", "reasoning": "r"})
    one += event(call("", "f")) + event(call('{"x"')) + event(call(": 1}"), "length") + "data: [DONE]\n\n"
    other = event({"content": "ab", "reasoning": "r"}) + event(call('{"x": 1}', "f"), "tool_calls")
    said = [joined(pieces_of(raw.encode())) for raw in (one, other)]
    assert said[0] == said[1] and said[0].calls == (("f", '{"x": 1}'),)
    assert [finish_of(pieces_of(raw.encode())) for raw in (one, other)] == ["length", "tool_calls"]
    assert joined([Piece("a")]) != joined([Piece("b")])
    assert pieces_of(b'data: {"choices": [], "usage": {}}\n\n') == [Piece()]


def test_a_session_that_parsed_nothing_is_no_measurement() -> None:
    with pytest.raises(EngineError, match="--parser tool: of 9 scripted tokens the session made"):
        render_bench._check(job(), joined([Piece("<tool_call>")]), 9)
    with pytest.raises(EngineError, match="--parser reasoning"):
        render_bench._check(job(parser="reasoning"), joined([Piece("only content")]), 9)
    render_bench._check(job(parser="none"), joined([Piece("x")]), 9)


# -- the connection


def answering(replies: list[bytes]) -> tuple[int, list[bytes]]:
    """A server for one connection that says `replies` in turn; what it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            for reply in replies:
                asked.append(connection.recv(65536))
                for at in range(0, len(reply), 7):  # in pieces, so that every cut is met
                    connection.sendall(reply[at : at + 7])

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], asked


def test_every_byte_of_a_connection_is_counted() -> None:
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kvferry-State: open\r\n\r\nhello"
    chunked = b"HTTP/1.1 404 no\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=1\r\nde\r\n0\r\n\r\n"
    port, asked = answering([plain, chunked])
    with Line(port) as line:
        first = line.ask("POST", "/a", b"body", {"x-kvferry-seq": "0"})
        second = line.ask("GET", "/b")
        assert (first.status, first.body, first.headers["x-kvferry-state"]) == (200, b"hello", "open")
        assert (second.status, second.body) == (404, b"abcde")
        assert line.sent == sum(map(len, asked)) and line.received == len(plain) + len(chunked)
        assert line.moved == line.sent + line.received
    assert asked[0].endswith(b"x-kvferry-seq: 0\r\n\r\nbody")


def test_a_connection_that_closes_in_an_answer_is_an_error() -> None:
    port, _ = answering([b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf"])
    with Line(port) as line, pytest.raises(EngineError, match="closed its connection in the middle"):
        line.ask("GET", "/")


# -- sampling


class Fake:
    """A derender endpoint whose call costs a microsecond per token before it, and says its number."""

    def __init__(self) -> None:
        self.used = 0.0
        self.numbers: list[int] = []

    def cpu_s(self) -> float:
        return self.used


def test_a_sample_of_a_linear_cost_is_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    port, _ = answering([])
    server: Any = fake
    fake.port = port  # type: ignore[attr-defined]
    ids = list(range(1000))
    states: list[Any] = []

    def call(self: Stateless, line: Line, number: int, state: Any) -> Any:
        fake.used += 1e-6 * number
        states.append(state)
        return {"chunk": {"choices": [{"delta": {"content": str(number)}, "finish_reason": None}]}}

    monkeypatch.setattr(Stateless, "_call", call)
    ours = {number: [Piece(calls=((0, "f", ""),))] if number == 500 else [Piece()] for number in range(1000)}
    cost = Stateless(server, chat("x", 1000, "tool"), [1, 2], ids).sampled(10, ours)
    assert cost.cpu_us == pytest.approx(500, rel=0.01) and cost.most_us == pytest.approx(950, rel=0.01)
    assert sorted(cost.pieces) == [50, 150, 250, 350, 450, 550, 650, 750, 850, 950]
    assert [len(state["output_token_ids"]) for state in states] == sorted(cost.pieces)
    assert [state["tools_streamed"] for state in states] == [False] * 5 + [True] * 5
    assert all(sum(state["output_chunk_lens"]) == len(state["output_token_ids"]) for state in states)


# -- what is told


def cost(cpu_us: float, nbytes: float, calls: int = 100, tokens: int = 100) -> Cost:
    pieces = {0: [Piece("x", finish="length")]}
    return Cost(cpu_us=cpu_us, wall_us=2 * cpu_us, nbytes=nbytes, calls=calls, tokens=tokens, pieces=pieces)


def measured(same: bool = True) -> Measured:
    made = Measured()
    made.points[100] = Point(ours=[cost(10, 400), cost(30, 400), cost(20, 400)], peer=[cost(100, 1000)], calls=3)
    made.points[400] = Point(ours=[cost(22, 440)], peer=[cost(900, 9000, 4, 400)], calls=12, same=same)
    block = Renders(alone_ms=[10.0, 12.0], cpu_ms=8.0, per_s=100.0, tokens=900)
    made.renders = {OURS: [block], PEER: [block]}
    return made


def test_facts_and_table() -> None:
    facts = facts_of(job(renders=2), measured(), {"cores": 2})
    first, last = facts["points"]
    assert (first["output_tokens"], first["cpu_us_per_token"], first["bytes_per_token"]) == (100, 20, 400)
    assert first["cpu_us"]["min"] == 10 and first["peer"]["sampled"] is None
    assert last["peer"]["sampled"]["calls"] == 4 and last["peer"]["sampled"]["of"] == 400
    assert facts["ratio"] == {
        "from": 100,
        "to": 400,
        "cpu_us_per_token": 1.1,
        "peer_cpu_us_per_token": 9.0,
        "bytes_per_token": 1.1,
        "peer_bytes_per_token": 9.0,
    }
    assert facts["renders"]["renders_per_core_s"] == 125.0 and facts["renders"]["peer"]["cpu_ms_per_render"] == 8.0
    shown = text(facts)
    assert "session CPU x1.10" in shown and "4 sampled" in shown and "NO" not in shown
    json.dumps(facts)
    assert " NO" in text(facts_of(job(renders=2), measured(same=False), {}))


def test_the_servers_are_started_alike() -> None:
    lines = {name: command(name, Path("/m"), 8400, 26_000, ["--reasoning-parser", "qwen3"]) for name in (OURS, PEER)}
    assert lines[OURS][-12:] == lines[PEER][-12:]
    assert lines[OURS][3:7] == ["render", "/m", "--workers", "1"]


def test_a_process_clock_counts_its_threads_in_nanoseconds() -> None:

    code = (
        "import threading, time\n"
        "def spin():\n"
        "    end = time.thread_time() + 0.15\n"
        "    while time.thread_time() < end: pass\n"
        "work = [threading.Thread(target=spin) for _ in range(2)]\n"
        "[one.start() for one in work]; [one.join() for one in work]\n"
        "print(time.process_time(), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        told = float(process.stdout.readline())
        seen = Server("x", 0, process).cpu_s()
        process.stdin.close()
    assert told >= 0.3 and told <= seen < told + 0.2
    assert clock_of(os.getpid()) < 0


def test_hosts_are_told_by_process() -> None:
    job_ = render_hosts.HostsJob(model="m", prompt_tokens=9, output_tokens=9, requests=1, max_model_len=9, seed=0)
    spent = {
        "without": render_hosts.Spent(
            cpu_ms={"decode-0 api": 30.0, "prefill-0 api": 10.0, "router": 1.0}, idle_ms_per_s={}, e2e_ms=[5.0]
        ),
        "with": render_hosts.Spent(
            cpu_ms={"decode-0 api": 18.0, "prefill-0 api": 2.0, "render": 9.0, "router": 2.0},
            idle_ms_per_s={},
            e2e_ms=[6.0],
        ),
    }
    facts = render_hosts.facts_of(job_, spent)
    assert facts["api_servers_cpu_ms"] == {"without": 40.0, "with": 20.0} and facts["left_share"] == 0.5
    rows = render_hosts.text(facts)
    assert ("render", "0.0", "9.0") in rows and ("API servers together", "40.0", "20.0") in rows


# -- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parser", "tol"], "--parser: unknown name 'tol' (did you mean 'tool'?)"),
        (["--tool-call-parser", "herms"], "did you mean 'hermes'?"),
        (["--output-tokens", "50,60"], "--output-tokens: 50 (expected 100 or more)"),
        (["--samples", "1"], "--samples: 1 (expected 2 or more)"),
        (["--engine-cpu", "--requests", "0"], "--requests: 0 (expected 1 or more)"),
    ],
)
def test_refusals(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "render", *arguments]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
