"""How much one engine carries, so that routers can be tested on it."""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time

import pytest

from kvferry.launch.ports import Ports
from kvferry.launch.web import healthy

STREAMS, TOKENS, RATE = 500, 100, 20


def read_streams(port: int) -> tuple[list[int], float]:
    """(tokens of each stream, seconds from the first request to the last byte). One thread, no HTTP library: the client
    must not be what limits."""
    ready = selectors.DefaultSelector()
    seen: dict[socket.socket, bytearray] = {}
    began = time.monotonic()
    for index in range(STREAMS):
        sock = socket.create_connection(("127.0.0.1", port))
        body = {"model": "instant", "prompt": [300 + index] * 20, "max_tokens": TOKENS}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        sock.setblocking(False)
        ready.register(sock, selectors.EVENT_READ)
        seen[sock] = bytearray()
    while ready.get_map():
        for key, _ in ready.select(timeout=30.0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            data = sock.recv(1 << 16)
            if data:
                seen[sock] += data
            else:
                ready.unregister(sock)
                sock.close()
    took = time.monotonic() - began
    assert all(b"data: [DONE]" in data for data in seen.values())
    # A token that waits for its turn travels with the next one, so tokens are counted by the last event's usage.
    usages = [re.findall(rb'"completion_tokens":(\d+)', data)[-1] for data in seen.values()]
    return [int(usage) for usage in usages], took


def test_500_streams_at_20_tokens_a_second_on_one_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: client and engine would share it")
    ports = Ports()
    port = ports.free()
    line = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "kvferry.cli", "engine", "--profile", "instant"]
    with subprocess.Popen([*line, "--port", str(port)]) as engine:
        try:
            until = time.monotonic() + 20
            while not healthy(f"http://127.0.0.1:{port}") and time.monotonic() < until:
                time.sleep(0.05)
            tries = [read_streams(port) for _ in range(3)]
        finally:
            engine.terminate()
            ports.release()
    assert all(tokens == [TOKENS] * STREAMS for tokens, _ in tries)
    rate = TOKENS / min(took for _, took in tries)  # what else the machine does only ever takes away
    print(f"{STREAMS} streams at {rate:.1f} tokens/s each")
    assert rate >= RATE
