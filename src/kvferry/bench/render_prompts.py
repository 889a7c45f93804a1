"""Rendering long chat prompts to ids: ours by opening a session and leaving it, vLLM's by its render endpoint."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvferry.bench.render_http import Line
from kvferry.bench.render_servers import OURS, Server
from kvferry.bench.render_stream import CHAT
from kvferry.errors import EngineError

Render = Callable[[Line, bytes], list[int]]


class Renders(msgspec.Struct, frozen=True, kw_only=True):
    """One block of requests. `alone_ms`: wall time of each, one at a time. The rest: `at_once` together."""

    alone_ms: list[float]
    cpu_ms: float
    per_s: float
    tokens: int


def ours(line: Line, body: bytes) -> list[int]:
    opened = line.ask("POST", "/v1/sessions", body, {"x-kvferry-path": CHAT})
    if opened.status != 200 or opened.headers.get("x-kvferry-state") != "open":
        raise EngineError(f"opening a session was answered {opened.status}: {opened.body[:300]!r}")
    facts = msgspec.json.decode(opened.body)
    left = line.ask("DELETE", f"/v1/sessions/{facts['session']}")
    if left.status != 200:
        raise EngineError(f"leaving a session was answered {left.status}: {left.body[:300]!r}")
    ids: list[int] = facts["requests"][0]["token_ids"]
    return ids


def peers(line: Line, body: bytes) -> list[int]:
    answered = line.ask("POST", f"{CHAT}/render", body)
    if answered.status != 200:
        raise EngineError(f"rendering was answered {answered.status}: {answered.body[:300]!r}")
    ids: list[int] = msgspec.json.decode(answered.body)["token_ids"]
    return ids


def render(server: Server) -> Render:
    return ours if server.name == OURS else peers


def block(server: Server, alone: Sequence[bytes], together: Sequence[bytes], at_once: int) -> Renders:
    """Raises `EngineError`."""
    ask = render(server)
    times, tokens = [], 0
    with Line(server.port) as line:
        for body in alone:
            begun = time.perf_counter()
            tokens = len(ask(line, body))
            times.append((time.perf_counter() - begun) * 1e3)
    waiting = iter(together)
    turn = threading.Lock()
    failed: list[EngineError] = []

    def work() -> None:
        with Line(server.port) as line:
            while not failed:
                with turn:
                    bodies = list(itertools.islice(waiting, 1))
                if not bodies:
                    return
                try:
                    ask(line, bodies[0])
                except EngineError as error:
                    failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    cpu, begun = server.cpu_s(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - begun, server.cpu_s() - cpu
    if failed:
        raise failed[0]
    return Renders(alone_ms=times, cpu_ms=cpu * 1e3 / len(together), per_s=len(together) / wall, tokens=tokens)
