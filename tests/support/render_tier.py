"""A render worker as a process, and scripted streams of an engine for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from kvferry.launch.model import prepare

JSON = {"content-type": "application/json"}
Chunk = list[Any]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json()["error"])

    @property
    def state(self) -> str:
        return self.headers.get("x-kvferry-state", "")


def ask(base: str, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
    where = urlsplit(base)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, JSON | named)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
    finally:
        connection.close()


@dataclass
class Session:
    """An open one. `said`: all bytes so far."""

    worker: str
    name: str
    requests: list[dict[str, Any]]
    seq: int = 0
    said: bytes = b""
    replies: list[Reply] = field(default_factory=list)

    def feed(self, *chunks: Chunk) -> Reply:
        path = f"/v1/sessions/{self.name}/tokens"
        reply = ask(self.worker, "POST", path, json.dumps(chunks).encode(), x_kvferry_seq=str(self.seq))
        assert reply.status == 200, reply.body
        self.seq += 1
        self.said += reply.body
        self.replies.append(reply)
        return reply

    @property
    def events(self) -> list[dict[str, Any]]:
        return events(self.said)

    def texts(self) -> dict[int, str]:
        """Content, or text, by choice."""
        found: dict[int, str] = {}
        for event in self.events:
            for choice in event["choices"]:
                piece = choice.get("text") if "text" in choice else choice["delta"].get("content")
                found[choice["index"]] = found.get(choice["index"], "") + (piece or "")
        return found


def events(body: bytes) -> list[dict[str, Any]]:
    found = []
    for event in body.split(b"\n\n")[:-1]:
        data = event[event.index(b"data: ") + 6 :]
        if data != b"[DONE]":
            found.append(json.loads(data))
    return found


@dataclass
class Tier:
    """`workers`: pid and own address of each."""

    url: str
    workers: list[tuple[int, str]]
    tokenizer: Tokenizer
    process: subprocess.Popen[bytes]

    def open(self, path: str, request: dict[str, Any], *, at: str = "", **headers: str) -> Reply:
        body = json.dumps({"model": "smollm2"} | request).encode()
        return ask(at or self.url, "POST", "/v1/sessions", body, x_kvferry_path=path, **headers)

    def session(self, path: str, request: dict[str, Any], *, at: str = "", **headers: str) -> Session:
        reply = self.open(path, request, at=at, **headers)
        assert (reply.status, reply.state) == (200, "open"), reply.body
        told = reply.json()
        return Session(told["worker"], told["session"], told["requests"])

    def chat(self, request: dict[str, Any] | None = None, *, at: str = "", **headers: str) -> Session:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        return self.session("/v1/chat/completions", asked | (request or {}), at=at, **headers)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def chunk(*tokens: int, leg: int = 0, choice: int = 0, end: str | None = None, **more: Any) -> Chunk:
    one = {"index": choice, "token_ids": list(tokens), "finish_reason": end, "stop_reason": None}
    one |= {"logprobs": more.pop("logprobs", None)}
    return [leg, {"request_id": "x", "choices": [one], **more}]


def stream(ids: Sequence[int], end: str = "stop", **more: Any) -> list[Chunk]:
    """One token per chunk; the last one ends it."""
    return [chunk(token, end=end if at == len(ids) - 1 else None, **more) for at, token in enumerate(ids)]


@contextmanager
def tier(*args: str, model: str = "smollm2", log: Path) -> Iterator[Tier]:
    line = [
        sys.executable,
        "-m",
        "kvferry.cli",
        "render",
        model,
        "--port",
        "0",
        "--served-model-name",
        "smollm2",
        *args,
    ]
    with log.open("wb") as errors:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, env={**os.environ})
    try:
        yield _ready(process, model, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[bytes], model: str, log: Path) -> Tier:
    assert process.stdout is not None
    workers = []
    for line in process.stdout:
        if said := re.match(rb"worker \d+ pid (\d+) port (\d+)$", line.strip()):
            workers.append((int(said[1]), f"http://127.0.0.1:{int(said[2])}"))
        if line.startswith(b"ready "):
            tokenizer = Tokenizer.from_file(str(prepare(model) / "tokenizer.json"))
            return Tier(line.split()[1].decode(), workers, tokenizer, process)
    raise AssertionError(f"the tier did not start: {log.read_text()[-2000:]}")
