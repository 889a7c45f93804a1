"""A render worker that only talks the session protocol, with simple rules for text: a prompt's ids are its bytes, an
event of the answer tells one chunk. It looks at the order of what it gets, and does what a test says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvferry.render.settings import Settings

PATH = "/v1/sessions"
DONE = "data: [DONE]\n\n"


class Session:
    """`told`: entries in the order in which they came."""

    def __init__(self, body: dict[str, Any], headers: Mapping[str, str], name: str) -> None:
        self.body, self.headers, self.name = body, headers, name
        self.path = headers["X-Kvferry-Path"]
        self.said = int(headers.get("X-Kvferry-Said", 0))
        self.created = int(headers.get("X-Kvferry-Created", 0)) or int(time.time())
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.replies: list[tuple[bytes, dict[str, str]]] = []
        self.events = 0
        self.failed = False
        self.deleted = asyncio.Event()
        prompt = body.get("prompt", body.get("input", body.get("messages")))
        prompts = prompt if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt) else [prompt]
        self.prompts = [one if isinstance(one, str) else json.dumps(one) for one in prompts]
        self.n = body.get("n") or 1
        self.ids: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], str] = {}
        self.usage: dict[int, dict[str, Any]] = {}
        self.cached: dict[int, Any] = {}
        self.scores: dict[int, Any] = {}

    def requests(self) -> list[dict[str, Any]]:
        sampling = {"detokenize": False, "max_tokens": self.body.get("max_tokens", 16)}
        sampling |= {key: self.body[key] for key in ("n", "prompt_logprobs", "temperature") if key in self.body}
        base = {"model": self.body.get("model"), "sampling_params": sampling, "stream": True}
        base |= {key: self.body[key] for key in ("kv_transfer_params",) if key in self.body}
        base |= {"stream_options": {"include_usage": True}}
        return [
            base | {"request_id": f"r{at}", "token_ids": list(text.encode())} for at, text in enumerate(self.prompts)
        ]

    def feed(self, entries: list[list[Any]]) -> tuple[bytes, dict[str, str]]:
        out, stopped, last = [], [], ""
        for index, chunk in entries:
            self.told.append((index, chunk))
            if chunk.get("error"):
                raw = self._raw(f"data: {json.dumps({'error': chunk['error']})}\n\n") + self._raw(DONE)
                out.append(raw)
                self.failed = True
            if "num_cached_tokens" in chunk:
                self.cached[index] = chunk["num_cached_tokens"]
            if "prompt_logprobs" in chunk:
                self.scores[index] = chunk["prompt_logprobs"]
            if chunk.get("usage"):
                self.usage[index] = chunk["usage"]
            for choice in chunk.get("choices", ()):
                key = (index, choice["index"])
                self.ids.setdefault(key, []).extend(choice["token_ids"])
                if choice.get("finish_reason"):
                    self.ended[key] = choice["finish_reason"]
                if self.body.get("stop") in choice["token_ids"]:
                    self.ended[key] = "stop"
                    stopped.append(f"{index}.{choice['index']}")
                out.append(self._event({"choice": list(key), "ids": choice["token_ids"]}))
        done = self.failed or len(self.ended) == self.n * len(self.prompts)
        if done and not self.failed and not self.body.get("stop"):
            done = len(self.usage) == len(self.prompts)
        if done and not self.failed:
            last = json.dumps(self._summary())
            out.append(self._event(self._summary()))
            out.append(self._raw(DONE))
        streams = bool(self.body.get("stream"))
        said = "".join(out).encode() if streams else last.encode()
        headers = {"X-Kvferry-State": "done" if done else "open", "X-Kvferry-Events": str(self.events)}
        if stopped:
            headers["X-Kvferry-Stop"] = ",".join(stopped)
        if said:
            kind = "text/event-stream; charset=utf-8" if streams else "application/json"
            headers |= {"X-Kvferry-Status": "200", "X-Kvferry-Content-Type": kind}
            headers["X-Kvferry-Created"] = str(self.created)
        return said, headers

    def _summary(self) -> dict[str, Any]:
        texts = [{"choice": list(key), "ids": ids, "why": self.ended[key]} for key, ids in sorted(self.ids.items())]
        usage = [self.usage.get(at) for at in range(len(self.prompts))]
        cached = [self.cached.get(at) for at in range(len(self.prompts))]
        return {
            "id": self.name,
            "choices": texts,
            "counts": usage,
            "cached": cached,
            "scores": list(self.scores.items()),
        }

    def _event(self, facts: dict[str, Any]) -> str:
        return self._raw(f"data: {json.dumps({'number': self.events, 'created': self.created} | facts)}\n\n")

    def _raw(self, text: str) -> str:
        self.events += 1
        return text if self.events > self.said else ""


class RenderStandIn:
    """`lost`: seqs whose first reply is cut off. `dies_at`: the seq at which it is gone, before or after it was taken.
    `heir`: lives on then. `full`: 429 to new sessions. `faults`: what was asked against the protocol."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings(model="toy", served_model_names=("toy",), max_model_len=4096)
        self.sessions: dict[str, Session] = {}
        self.opened: list[Session] = []
        self.plain: list[tuple[str, bytes]] = []
        self.faults: list[str] = []
        self.lost: set[int] = set()
        self.dies_at: int | None = None
        self.dead = False
        self.heir: RenderStandIn | None = None
        self.full = False
        self.busy = False
        """An opening is not answered; `left`: the router has closed its connection."""
        self.left = asyncio.Event()
        self.asked = 0
        """Openings and plain requests that came, whatever became of them."""
        self.dead_to = ""
        """The handler whose requests kill it."""
        self.exits = False
        """It stops to listen when it is killed."""
        self.hold: asyncio.Event | None = None
        self.held = asyncio.Event()
        self.shared = ""
        """The address that it answers settings with, "" for none."""
        self._numbers = itertools.count()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post(PATH, self._open)
        app.router.add_get(PATH + "/settings", self._settings)
        app.router.add_post(PATH + "/{name}/tokens", self._tokens)
        app.router.add_delete(PATH + "/{name}", self._delete)
        app.router.add_post("/{tail:.*}", self._plain)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _gone(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        if self.exits and self._site is not None and self._site._server is not None:
            self._site._server.close()
        request.transport.abort()
        return web.Response()

    async def _settings(self, request: web.Request) -> web.StreamResponse:
        if self.dead:
            return self._gone(request)
        return web.json_response(msgspec.to_builtins(self.settings) | {"worker": self.shared})

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.dead or self.dead_to == "_plain":
            return self._gone(request)
        self.plain.append((request.path, await request.read()))
        return web.json_response({"tokens": [1, 2, 3]})

    async def _open(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.asked += 1
        if self.dead or self.dead_to == "_open":
            return self._gone(request)
        if self.busy:
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if self.full:
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "3"})
        try:
            body = json.loads(raw)
        except ValueError:
            said = {"error": {"message": "no JSON", "type": "Bad Request", "param": None, "code": 400}}
            return web.json_response(said, status=400, headers={"X-Kvferry-State": "done"})
        if body.get("prompt") == "refused":
            said = {
                "error": {"message": "refused by the tier", "type": "BadRequestError", "param": "prompt", "code": 400}
            }
            return web.json_response(said, status=400, headers={"X-Kvferry-State": "done"})
        name = f"s{next(self._numbers)}"
        session = Session(body, request.headers.copy(), request.headers.get("X-Request-Id", ""))
        self.sessions[name] = session
        self.opened.append(session)
        facts = {"session": name, "worker": self.url, "requests": session.requests()}
        return web.json_response(facts, headers={"X-Kvferry-State": "open"})

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self.dead:
            return self._gone(request)
        session = self.sessions.get(request.match_info["name"])
        if session is None:
            return web.json_response({"error": {"message": "unknown", "type": "session_unknown"}}, status=404)
        seq = int(request.headers["X-Kvferry-Seq"])
        if self.hold is not None:
            self.held.set()
            await self.hold.wait()
        if seq > len(session.replies) or seq < len(session.replies) - 1:
            self.faults.append(f"seq {seq}, expected {len(session.replies)}")
            return web.json_response({"error": {"message": "order"}}, status=409)
        if seq == len(session.replies):
            session.replies.append(session.feed(json.loads(raw)))
        if self.dies_at == seq:
            self.dead = True
            if self.heir is not None:
                self.heir.dies_at = None
            return self._gone(request)
        if seq in self.lost:
            self.lost.discard(seq)
            return self._gone(request)
        body, headers = session.replies[seq]
        return web.Response(body=body, headers=headers)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        session = self.sessions.pop(request.match_info["name"], None)
        if session is not None:
            session.deleted.set()
        return web.Response(status=204 if session is not None else 404)
