"""A prefill and a decode engine that cost next to nothing, in one process: what is measured before them is the router.

They answer as vLLM does with its NIXL connector, or with ours where a leg names a transfer id: the prefill leg with
`kv_transfer_params`, the decode leg with a stream of chunks, each written by itself. All streams of the process take a
step together, as an engine's do. One event loop, no HTTP library: a request costs some tens of microseconds.

Started as `python -m kvferry.bench.router_engines CHUNKS STEP_MS`; prints three ports: of the prefill engine, of the
decode engine, of the prefill engine's side channel (the decode engine's is the next). Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable

import zmq
import zmq.asyncio

from kvferry.ids import EngineId, LifeId
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.protocol import codec
from kvferry.protocol.messages import Describe, Description, Refuse

MODEL = "scripted"
_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "scripted-prefill",
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_host": LOOPBACK,
    "remote_port": 9,
    "tp_size": 1,
}
_USAGE = {"prompt_tokens": 64, "total_tokens": 65, "completion_tokens": 1}


def _whole(body: dict[str, object], status: str = "200 OK") -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _completion(text: str, finish: str | None, **more: object) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1764500000,
        "model": MODEL,
        "choices": [choice],
    } | more


def _framed(payload: bytes) -> bytes:
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


PREFILL_REPLY = _whole(_completion(" x", "length", usage=_USAGE, kv_transfer_params=_PARAMS))
_TRANSFER = re.compile(rb'"transfer_id": ?"([^"]+)"')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = _framed(json.dumps(_completion(" word", None)).encode())
END = _framed(json.dumps(_completion("", "length")).encode()) + _framed(b"[DONE]") + b"0\r\n\r\n"
MODELS = _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]})
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; bodies by Content-Length only, one request at a time."""

    def __init__(self, answer: Callable[[Connection, bytes], None], open_ones: set[Connection]) -> None:
        self._answer = answer
        self._open = open_ones
        self._seen = b""
        self.chunks_left = 0
        self.full = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        self._seen = b""
        if head.startswith(b"POST"):
            self._answer(self, body)
        else:
            self.transport.write(MODELS if head.startswith(b"GET /v1/models") else HEALTHY)


def prefill(connection: Connection, body: bytes) -> None:
    named = _TRANSFER.search(body)
    if named is None:
        connection.transport.write(PREFILL_REPLY)
        return
    params = {"transfer_id": named[1].decode()}
    connection.transport.write(_whole(_completion(" x", "length", usage=_USAGE, kv_transfer_params=params)))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class Decode:
    """Streams of `chunks` chunks; the first at once, the others one in each step."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.open: set[Connection] = set()

    def answer(self, connection: Connection, body: bytes) -> None:
        connection.transport.write(STREAM_HEAD + CHUNK)
        connection.chunks_left = self._chunks - 1
        self.open.add(connection)

    def step(self) -> None:
        for connection in tuple(self.open):
            if connection.full:
                continue
            if connection.chunks_left:
                connection.chunks_left -= 1
                connection.transport.write(CHUNK)
            else:
                self.open.discard(connection)
                connection.transport.write(END)


async def describe(port: int, role: str) -> None:
    """A side channel that says what the engine is, and refuses all else: nothing goes wrong here."""
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"tcp://{LOOPBACK}:{port}")
    about = Description(
        engine_id=EngineId(f"scripted-{role}"),
        life=LifeId(1),
        rank=0,
        tp_size=1,
        role=role,
        mode="push",
        block_size=16,
        version="0",
    )
    while True:
        peer, raw = await socket.recv_multipart()
        asked = codec.decode(raw)
        answer = about if isinstance(asked, Describe) else Refuse(code="unknown_question", reason="scripted")
        await socket.send_multipart([peer, codec.encode(answer)])


async def serve(chunks: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    decode = Decode(chunks)
    servers = [
        await loop.create_server(lambda: Connection(prefill, set()), LOOPBACK),
        await loop.create_server(lambda: Connection(decode.answer, decode.open), LOOPBACK),
    ]
    side = Ports().free(2)
    sides = [asyncio.create_task(describe(side + offset, role)) for offset, role in enumerate(("producer", "consumer"))]
    print(*(server.sockets[0].getsockname()[1] for server in servers), side, flush=True)
    ended = loop.run_in_executor(None, sys.stdin.read)
    due = loop.time()
    while not ended.done() and not any(task.done() for task in sides):
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        decode.step()
    for task in sides:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000.0))
