"""The render tier beside vLLM's own render server: prompts to ids, and streams of ids to what clients read."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvferry.bench.pinned import pinned
from kvferry.bench.render_http import Line
from kvferry.bench.render_prompts import Renders, block, render
from kvferry.bench.render_said import Said, finish_of, joined
from kvferry.bench.render_script import MODEL, Parser, chat, prompt_text, script
from kvferry.bench.render_servers import OURS, PEER, Server, serving
from kvferry.bench.render_stream import Cost, Stateless, by_session
from kvferry.bench.stats import summary
from kvferry.engine.folder_tokenizer import FolderTokenizer
from kvferry.errors import ConfigError, EngineError

STREAM_PROMPT_TOKENS = 200
WARM_TOKENS = 200
ROOM = 512
"""Tokens beside prompt and output that the model's limit leaves: the template's own."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`whole`: longest output whose stateless stream is called whole where a parser makes it replay; longer ones are
    sampled by `samples` calls. `renders`: prompts per round and server, `at_once` together; 0 measures streams only."""

    model: Path
    output_tokens: tuple[int, ...]
    parser: Parser
    tool_parser: str
    reasoning_parser: str
    prompt_tokens: int
    renders: int
    at_once: int
    rounds: int
    whole: int
    samples: int
    seed: int

    @property
    def parser_args(self) -> list[str]:
        if self.parser == "tool":
            return ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        return ["--reasoning-parser", self.reasoning_parser] if self.parser == "reasoning" else []

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens + max(self.output_tokens) + ROOM


class Point(msgspec.Struct, kw_only=True):
    """All passes of one length. `same`: whether both said the same in all of them."""

    ours: list[Cost] = []
    peer: list[Cost] = []
    calls: int = 0
    same: bool = True


class Measured(msgspec.Struct, kw_only=True):
    points: dict[int, Point] = {}
    renders: dict[str, list[Renders]] = {}
    same_ids: bool = True


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = FolderTokenizer(folder)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def measure(job: Job, say: Callable[[str], None]) -> Measured:
    """Raises `ConfigError` without two cores, `LaunchError` if a server doesn't come, `EngineError` if it fails."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("the servers need a core to themselves: this process may use one", hint="two cores or more")
    tokenizer = Vocabulary(job.model)
    measured = Measured()
    with pinned(cores[:-1]), ExitStack() as stack:
        servers = [
            stack.enter_context(serving(name, job.model, cores[-1], job.max_model_len, job.parser_args))
            for name in (OURS, PEER)
        ]
        say("both servers are up")
        _streams(job, tokenizer, servers, WARM_TOKENS, seed=-1)
        for round_ in range(job.rounds):
            turned = servers if round_ % 2 == 0 else servers[::-1]
            if job.renders:
                _renders(job, tokenizer, turned, round_, measured, say)
            for tokens in job.output_tokens:
                point = measured.points.setdefault(tokens, Point())
                ours, peer, calls, same = _streams(job, tokenizer, turned, tokens, seed=round_)
                point.ours.append(ours)
                point.peer.append(peer)
                point.calls, point.same = calls, point.same and same
                say(
                    f"round {round_ + 1}, {tokens} tokens: session {ours.cpu_us:.0f} us and {ours.nbytes:.0f} bytes a "
                    f"token, stateless {peer.cpu_us:.0f} us and {peer.nbytes:.0f} bytes"
                    + ("" if same else "; THEY DIFFER")
                )
    return measured


def _renders(
    job: Job,
    tokenizer: Vocabulary,
    servers: Sequence[Server],
    round_: int,
    measured: Measured,
    say: Callable[[str], None],
) -> None:
    """The same prompts for both servers, none of them seen before."""
    seeds = range(1_000_000 * (round_ + 1), 1_000_000 * (round_ + 1) + job.renders + job.renders // 2)
    bodies = [
        msgspec.json.encode(chat(prompt_text(tokenizer, job.prompt_tokens, job.seed + seed), 16, job.parser))
        for seed in seeds
    ]
    alone, together = bodies[job.renders :], bodies[: job.renders]
    ids = []
    for server in servers:
        got = block(server, alone, together, job.at_once)
        measured.renders.setdefault(server.name, []).append(got)
        with Line(server.port) as line:
            ids.append(render(server)(line, alone[0]))
        say(f"round {round_ + 1}, {server.name}: {got.cpu_ms:.1f} ms CPU a render, {got.per_s:.1f} renders/s")
    measured.same_ids = measured.same_ids and ids[0] == ids[1]


def _streams(
    job: Job, tokenizer: Vocabulary, servers: Sequence[Server], tokens: int, seed: int
) -> tuple[Cost, Cost, int, bool]:
    """(ours, the peer's, tool calls in the script, whether they said the same) of one output."""
    by_name = {server.name: server for server in servers}
    made = script(tokenizer, job.parser, job.tool_parser, tokens, job.seed + seed)
    body = chat(prompt_text(tokenizer, STREAM_PROMPT_TOKENS, job.seed + seed), tokens, job.parser)
    ours, prompt = by_session(by_name[OURS], body, made.ids)
    stateless = Stateless(by_name[PEER], body, prompt, made.ids)
    if job.parser == "none" or tokens <= job.whole:
        peer = stateless.whole()
        mine = joined(piece for number in range(tokens) for piece in ours.pieces[number])
        same = mine == joined(piece for pieces in peer.pieces.values() for piece in pieces)
    else:
        peer = stateless.sampled(job.samples, ours.pieces)
        same = all(joined(pieces) == joined(ours.pieces[number]) for number, pieces in peer.pieces.items())
    _check(job, joined(piece for pieces in ours.pieces.values() for piece in pieces), tokens)
    return ours, peer, made.calls, same


def _check(job: Job, said: Said, tokens: int) -> None:
    """A measurement of parsers that parsed nothing is none. Raises `EngineError`."""
    there = {"tool": bool(said.calls), "reasoning": bool(said.reasoning and said.content), "none": bool(said.content)}
    if not there[job.parser]:
        raise EngineError(f"--parser {job.parser}: of {tokens} scripted tokens the session made {said}"[:300])


def facts_of(job: Job, measured: Measured, environment: dict[str, Any]) -> dict[str, Any]:
    """The keys of the JSON file. CPU times are of the server's process, its threads included."""
    points = []
    for tokens, point in measured.points.items():
        facts = _cost(point.ours)
        facts |= {"output_tokens": tokens, "parser": job.parser, "tool_calls": point.calls, "same_output": point.same}
        points.append(facts | {"peer": _cost(point.peer)})
    facts = {"points": points, "ratio": _ratio(points)}
    if measured.renders:
        blocks = {name: _rendered(got) for name, got in measured.renders.items()}
        facts["renders"] = {
            "prompt_tokens": max(got.tokens for all_ in measured.renders.values() for got in all_),
            "at_once": job.at_once,
            "same_ids": measured.same_ids,
            **blocks[OURS],
            "peer": blocks[PEER],
        }
    settings = msgspec.to_builtins(job, enc_hook=str) | {"stream_prompt_tokens": STREAM_PROMPT_TOKENS, "model": MODEL}
    return facts | {"settings": settings, "environment": environment}


def _cost(passes: Sequence[Cost]) -> dict[str, Any]:
    """Medians over the rounds under the plain names, all about them beside it."""
    cpu, wall, nbytes = ([getattr(one, name) for one in passes] for name in ("cpu_us", "wall_us", "nbytes"))
    facts: dict[str, Any] = {
        "cpu_us_per_token": round(statistics.median(cpu), 2),
        "bytes_per_token": round(statistics.median(nbytes), 1),
        "wall_us_per_token": round(statistics.median(wall), 2),
        "cpu_us": summary(cpu),
        "bytes": summary(nbytes),
    }
    first = passes[0]
    whole = first.calls == first.tokens
    most = max(one.most_us for one in passes)
    facts["sampled"] = None if whole else {"calls": first.calls, "of": first.tokens, "dearest_us": round(most, 1)}
    facts["finish_reason"] = finish_of(piece for pieces in first.pieces.values() for piece in pieces)
    return facts


def _ratio(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per token, of the longest output to the shortest."""
    low, high = min(points, key=_length), max(points, key=_length)
    facts: dict[str, Any] = {"from": low["output_tokens"], "to": high["output_tokens"]}
    for name in ("cpu_us_per_token", "bytes_per_token"):
        facts[name] = round(high[name] / low[name], 3)
        facts[f"peer_{name}"] = round(high["peer"][name] / low["peer"][name], 3)
    return facts


def _length(point: dict[str, Any]) -> int:
    return int(point["output_tokens"])


def _rendered(blocks: Sequence[Renders]) -> dict[str, Any]:
    cpu = [one.cpu_ms for one in blocks]
    return {
        "cpu_ms_per_render": round(statistics.median(cpu), 3),
        "renders_per_core_s": round(1e3 / statistics.median(cpu), 1),
        "renders_per_s": round(statistics.median(one.per_s for one in blocks), 1),
        "cpu_ms": summary(cpu),
        "alone_ms": summary([value for one in blocks for value in one.alone_ms]),
    }
