"""Ranks for the doctor: the connector's worker half over numpy memory, real NIXL and ZMQ, each in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np
from nixl_tier import Child, free_port

PLANES, BLOCKS, BLOCK, HEADS, TOKEN = 4, 32, 16, 4, 64
FINGERPRINT = {"model": "m#1", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "kv_packing": "plain"}


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free."""
    import socket

    while True:
        first = free_port()
        taken = []
        try:
            for port in range(first, first + count):
                one = socket.socket()
                taken.append(one)
                one.bind(("127.0.0.1", port))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in taken:
                one.close()


def engine_child(pipe: Any, settings: dict[str, Any]) -> None:
    """One rank. `settings`: name, role, port (of rank 0), rank, tp, fingerprint, block_size, block, config, slow_get,
    ucx_tls. Calls: close."""
    import os

    os.environ["UCX_TLS"] = settings.get("ucx_tls", "tcp,self")

    from kvferry.config import connector_config
    from kvferry.connector.blocks import Caches
    from kvferry.connector.worker_side import WorkerSide
    from kvferry.engine.faults import Faults, MakeFabric, SlowLink
    from kvferry.protocol.messages import Layout, Plane
    from kvferry.story import Story
    from kvferry.transfer.channel import ZmqChannel
    from kvferry.transfer.peers import Identity

    rank, tp, size = settings.get("rank", 0), settings.get("tp", 1), settings.get("block_size", BLOCK)
    heads = max(1, HEADS // tp)
    stride = heads * size * TOKEN
    memory = np.zeros((PLANES, BLOCKS * stride), np.uint8)
    layout = Layout(
        planes=tuple(
            Plane(base=memory[i].ctypes.data, block_stride=stride, head_stride=size * TOKEN, token_bytes=TOKEN)
            for i in range(PLANES)
        ),
        num_blocks=BLOCKS,
        block_size=size,
        heads=settings.get("heads", heads),
        total_heads=HEADS,
        divisible=settings.get("divisible", True),
        device="cpu",
        fingerprint={**FINGERPRINT, **settings.get("fingerprint", {})},
    )
    port = settings["port"] + rank
    config = connector_config({"side_channel_port": settings["port"], **settings.get("config", {})}, {})
    identity = Identity(settings["name"], rank, tp, settings["role"])
    worker = WorkerSide(config, identity, ZmqChannel("127.0.0.1", port), Story(None, "x", rank))
    slow = SlowLink(op="READ", factor=settings["slow_get"]) if "slow_get" in settings else None
    caches = Caches(layout, [(memory.ctypes.data, memory.nbytes)], 1)
    worker.start(caches, MakeFabric(Faults(slow=slow), config.backends, 0))
    pipe.send("ready")
    while pipe.recv() != ("close",):
        pass
    worker.close()


class Ranks:
    """All ranks of one engine. `where`: its side channel, as the doctor takes it."""

    def __init__(self, name: str, role: str, tp: int = 1, **settings: Any) -> None:
        self.port = free_ports(tp)
        self.where = f"127.0.0.1:{self.port}"
        base = {"name": name, "role": role, "port": self.port, "tp": tp, **settings}
        self.children = [Child(engine_child, {**base, "rank": rank}) for rank in range(tp)]

    def ready(self) -> Ranks:
        for child in self.children:
            assert child.receive() == "ready"
        return self

    def close(self) -> None:
        for child in self.children:
            child.stop()
            assert child.process.exitcode == 0
