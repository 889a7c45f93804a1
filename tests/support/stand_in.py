"""An engine that only talks: OpenAI's completions and the side channel, at a given pace, with no model and no KV.

`python tests/support/stand_in.py --role decode --port 8200 --side-port 5700 --events 12 --pace 2`. It can be killed and
started again on the same ports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from kvferry.protocol import codec
from kvferry.protocol.messages import Abandon, Abandoned, Describe, Description, Refuse, Verdict, Why

MODEL = "stand-in"


class StandIn:
    """`events` tokens per answer, `pace_s` between two; prefill takes half of that, up to 0.2 s."""

    def __init__(self, role: str, events: int, pace_s: float) -> None:
        self._role = role
        self._events = events
        self._pace_s = pace_s
        self._life = secrets.randbits(62)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._prefill if self._role == "prefill" else self._decode)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _prefill(self, request: web.Request) -> web.Response:
        params = (await request.json())["kv_transfer_params"]
        await asyncio.sleep(random.random() * min(0.2, self._pace_s / 2))
        reply: dict[str, Any] = {"id": "p", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
        reply |= {"usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
        return web.json_response(reply | {"kv_transfer_params": {"transfer_id": params["transfer_id"]}})

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        token = b'data: {"id":"d","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
        await asyncio.sleep(random.random() * self._pace_s)
        for _ in range(self._events):
            await response.write(token)
            await asyncio.sleep(self._pace_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def side_channel(self, port: int) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(f"tcp://127.0.0.1:{port}")
        while True:
            peer, raw = await socket.recv_multipart()
            await socket.send_multipart([peer, codec.encode(self._answer(codec.decode(raw)))])

    def _answer(self, question: Any) -> Any:
        if isinstance(question, Describe):
            return Description(
                engine_id=f"{self._role}-stand-in",
                life=self._life,
                rank=0,
                tp_size=1,
                role="producer" if self._role == "prefill" else "consumer",
                mode="push",
                block_size=16,
                version="0",
            )
        if isinstance(question, Abandon):
            return Abandoned(transfer_id=question.transfer_id, known=True)
        if isinstance(question, Why):
            return Verdict(transfer_id=question.transfer_id, state="unknown", code="", reason="")
        return Refuse(code="unknown_question", reason=f"what is a {type(question).__name__}?")


async def serve(args: argparse.Namespace) -> None:
    engine = StandIn(args.role, args.events, args.pace)
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port, backlog=4096).start()
    print(json.dumps({"ready": args.port}), flush=True)
    await engine.side_channel(args.side_port)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--side-port", type=int, required=True)
    parser.add_argument("--events", type=int, default=12)
    parser.add_argument("--pace", type=float, default=2.0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
