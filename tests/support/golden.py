"""A server whose delays are known, to prove load generators by: `python golden.py --spec JSON`, or `Golden(...)`.

A process of its own, so that it shares no interpreter with the client under test. Each completion gets its first token
`first_ms[i % n]` after it came and the next ones `gaps_ms[i % m]` apart, each at an absolute time, i counting the
requests. With `queue` first tokens are made one request after the other, each `first_ms` after the one before or after
it came. `GET /record` returns, for each request, when it came and when each of its events had been given to the
socket, in seconds of one clock; the tests' own arithmetic starts there.

What can be wrong on purpose: `wrong` is 'zero' (no tokens), 'error' (500), 'cut' (ends without [DONE]), 'short' (one
token less than asked for), 'cached' (its metrics and stories say that half of each prompt came from a prefix cache),
'late' (its metrics say that it overran its model by a quarter of the time). It strikes requests from `wrong_from` on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from aiohttp import web

BLOCK = 16


class Server:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.first_ms, self.gaps_ms = spec["first_ms"], spec["gaps_ms"]
        self.wrong, self.wrong_from = spec["wrong"], spec["wrong_from"]
        self.record: list[dict[str, Any]] = []
        self.busy_until = 0.0
        self.prompt_tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.begun = time.perf_counter()
        self.tokenizer = None
        if spec["tokenizer"]:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(f"{spec['tokenizer']}/tokenizer.json")
        self.story = None
        if spec["story_dir"]:
            from kvferry.story import Story

            self.story = {side: Story(spec["story_dir"], side) for side in ("router", "prefill", "decode")}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/record", self.records)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "golden", "object": "model", "root": "golden"}]})

    async def health(self, request: web.Request) -> web.Response:
        me = f"http://{request.host}"
        engines = [{"url": me, "role": "decode", "ready": True, "reason": ""}]
        return web.json_response({"status": "ready", "missing": [], "engines": engines})

    async def metrics(self, request: web.Request) -> web.Response:
        lines = ["# TYPE vllm:prompt_tokens_by_source counter"]
        lines += [
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="{name}"}} {value}'
            for name, value in self.prompt_tokens.items()
        ]
        late = (time.perf_counter() - self.begun) / 4 if self.wrong == "late" else 0.0
        lines += ["# TYPE kvferry_engine_late_seconds counter", f"kvferry_engine_late_seconds_total {late}", ""]
        return web.Response(text="\n".join(lines))

    async def records(self, request: web.Request) -> web.Response:
        return web.json_response(self.record)

    def _length(self, prompt: str | list[int]) -> int:
        if isinstance(prompt, list):
            return len(prompt)
        return len(self.tokenizer.encode(prompt, add_special_tokens=False).ids) if self.tokenizer else len(prompt)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        came = time.perf_counter()
        body = await request.json()
        number = len(self.record)
        entry: dict[str, Any] = {"came": came, "sent": [], "id": request.headers.get("x-request-id", "")}
        self.record.append(entry)
        wrong = self.wrong if number >= self.wrong_from else ""
        length, asked = self._length(body["prompt"]), int(body["max_tokens"])
        entry["input_len"] = length
        transfer = f"t{number}"
        self._account(transfer, length, entry["id"], cached=wrong == "cached")
        if wrong == "error":
            return web.json_response({"error": {"message": "golden error"}}, status=500)
        usage = {"prompt_tokens": length, "total_tokens": length}
        if not body.get("stream"):
            return web.json_response(
                {"choices": [{"text": " a" * asked}], "usage": {**usage, "completion_tokens": asked}}
            )
        tokens = {"zero": 0, "short": asked - 1}.get(wrong, asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-kvferry-transfer-id": transfer})
        await response.prepare(request)
        first = self.first_ms[number % len(self.first_ms)] / 1e3
        if self.spec["queue"]:
            self.busy_until = max(came, self.busy_until) + first
            first = self.busy_until - came
        gap = self.gaps_ms[number % len(self.gaps_ms)] / 1e3
        head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": "golden"}
        for index in range(tokens):
            await asyncio.sleep(max(0.0, came + first + index * gap - time.perf_counter()))
            choice = {"index": 0, "text": " a", "finish_reason": "length" if index + 1 == tokens else None}
            event = {**head, "choices": [choice], "usage": {**usage, "completion_tokens": index + 1}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            entry["sent"].append(time.perf_counter())
        self._note("router", transfer, "last_token")
        last = {**head, "choices": [], "usage": {**usage, "completion_tokens": tokens, "total_tokens": length + tokens}}
        await response.write(f"data: {json.dumps(last)}\n\n".encode())
        if wrong != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _account(self, transfer: str, length: int, request_id: str, *, cached: bool) -> None:
        """A push that took 2 ms after the end of prefill, of all prompt tokens but the last, in whole blocks."""
        hit = length // 2 if cached else 0
        split = self.story is not None
        self.prompt_tokens["local_cache_hit"] += hit
        self.prompt_tokens["external_kv_transfer"] += length - 1 - hit if split else 0
        self.prompt_tokens["local_compute"] += 1 if split else length - hit
        blocks = -(-(length - 1 - hit) // BLOCK)
        now = time.time()
        self._note("router", transfer, "received", t=now, request_id=request_id)
        self._note("decode", transfer, "allocated", t=now, tokens=length - 1 - hit)
        self._note("decode", transfer, "registered", t=now + 0.001)
        self._note("prefill", transfer, "computed", t=now + 0.010)
        nbytes = blocks * BLOCK * self.spec["kv_bytes"]
        self._note("prefill", transfer, "posted", t=now + 0.011, nbytes=nbytes, descriptors=4)
        self._note("decode", transfer, "landed", t=now + 0.012)

    def _note(self, side: str, transfer: str, event: str, **facts: Any) -> None:
        if self.story is not None:
            self.story[side].note(transfer, event, **facts)


async def serve(spec: dict[str, Any]) -> None:
    runner = web.AppRunner(Server(spec).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"listening http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with whoever started it
    await runner.cleanup()


class Golden:
    """`with`. `url`; `record()` without the requests that are not measured is the caller's business."""

    def __init__(
        self,
        *,
        first_ms: tuple[float, ...] = (200.0,),
        gaps_ms: tuple[float, ...] = (20.0,),
        wrong: str = "",
        wrong_from: int = 0,
        tokenizer: Path | None = None,
        story_dir: Path | None = None,
        kv_bytes: int = 64,
        queue: bool = False,
    ) -> None:
        self.spec = {
            "first_ms": first_ms,
            "gaps_ms": gaps_ms,
            "wrong": wrong,
            "wrong_from": wrong_from,
            "tokenizer": str(tokenizer or ""),
            "story_dir": str(story_dir or ""),
            "kv_bytes": kv_bytes,
            "queue": queue,
        }
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--spec", json.dumps(self.spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening "), f"the golden server did not start: {line!r}"
        self.url = line.split()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")

    def record(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/record", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=json.loads, required=True)
    asyncio.run(serve(parser.parse_args().spec))
