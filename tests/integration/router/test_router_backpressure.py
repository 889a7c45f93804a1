"""A client that reads slowly holds its engine back, not memory; and many streams for a while."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from router_process import router
from scripted import DONE, MODEL, Call, Engine, begin_stream, decode_ok, event

MIB = 1024 * 1024
IN_SOCKETS = 64 * MIB
"""What the kernel may keep of two loopback connections, which it sizes itself: beyond it the engine must wait."""
IN_MEMORY = 16 * MIB
MANY = Path(__file__).parents[3] / "scripts" / "many_streams.py"


async def test_a_slow_client_holds_the_engine_not_memory() -> None:
    written = 0
    most = 256 * MIB

    async def flood(call: Call) -> web.StreamResponse:
        nonlocal written
        if call.body["prompt"] != "flood":
            return await decode_ok(call)
        response = await begin_stream(call)
        piece = event("x" * 65_000)
        while written < most:
            await response.write(piece)
            written += len(piece)
        await response.write(DONE)
        return response

    async def still() -> int:
        """Bytes that the engine got rid of, once it waits."""
        while True:
            before = written
            await asyncio.sleep(0.3)
            if written == before:
                return written

    prefill, decode = Engine("prefill"), Engine("decode")
    decode.script = flood
    await prefill.start()
    await decode.start()
    specs = [f"{one.url},side_channel=127.0.0.1:{one.side.port}" for one in (prefill, decode)]
    try:
        async with router("--port", "0", "--prefill", specs[0], "--decode", specs[1]) as process:
            assert process.stdout is not None
            host, port = (await process.stdout.readline()).decode().split("//")[1].strip().split(":")
            memory = psutil.Process(process.pid).memory_info
            body = {"model": MODEL, "prompt": "warm", "stream": True}
            async with asyncio.timeout(60):
                while b"[DONE]" not in await ask(host, int(port), body):
                    await asyncio.sleep(0.1)
                before = memory().rss
                slow = await asyncio.to_thread(connect, host, int(port), body | {"prompt": "flood"})
                assert 0 < await still() < IN_SOCKETS
                assert memory().rss - before < IN_MEMORY
                assert b"[DONE]" in await ask(host, int(port), body), "others aren't held"
                held, taken = written, 0
                while taken < 64 * MIB:
                    taken += len(await asyncio.get_running_loop().sock_recv(slow, MIB))
                assert held + 32 * MIB < await still() <= taken + IN_SOCKETS, "as it reads, the engine goes on"
                assert memory().rss - before < IN_MEMORY
                slow.close()
                await decode.calls[-2].cancelled.wait()
    finally:
        await prefill.stop()
        await decode.stop()


def connect(host: str, port: int, body: dict) -> socket.socket:
    """A connection with the request sent and nothing read."""
    client = socket.create_connection((host, port))
    client.sendall(raw(body))
    client.setblocking(False)
    return client


def raw(body: dict) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


async def ask(host: str, port: int, body: dict) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(raw(body))
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.timeout(180)
def test_many_streams_clients_that_leave_and_engines_that_are_killed(tmp_path: Path) -> None:
    """C19, small: `scripts/many_streams.py` for twelve seconds; the full run is 2,000 streams for five minutes."""
    line = [sys.executable, str(MANY), "--minutes", "0.2", "--streams", "200", "--events", "6", "--pace", "0.4"]
    line += ["--kill-every", "3", "--down", "1", "--leave", "0.05", "--log", str(tmp_path / "router.log")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([*line, "--json", str(tmp_path / "soak.json")], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "soak.json").read_text())
    assert facts["ok"] and facts["untyped"] == [] and facts["most_at_once"] >= 190
    assert facts["ends"]["done"] > 200 and facts["ends"]["left"] > 0 and sum(facts["kills"].values()) >= 1
