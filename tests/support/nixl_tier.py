"""Ranks in processes of their own, over real NIXL and ZMQ. Importable, since `spawn` looks its functions up by name."""

from __future__ import annotations

import os

os.environ.setdefault("UCX_TLS", "tcp,self")

import multiprocessing as mp
import socket
import threading
import time
import traceback
from typing import Any

import numpy as np

PLANES, BLOCKS, BLOCK, HEADS, TOKEN = 4, 32, 16, 2, 64
SHAPE = (PLANES, BLOCKS, HEADS * BLOCK * TOKEN)
WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Child:
    """A process that runs `target(pipe, *args)` and answers each call it gets."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_guard, args=(target, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *message: Any) -> None:
        self.pipe.send(message)

    def receive(self) -> Any:
        if not self.pipe.poll(WAIT_S):
            raise TimeoutError("the child did not answer")
        answer = self.pipe.recv()
        if isinstance(answer, str) and answer.startswith("Traceback"):
            raise AssertionError(answer)
        return answer

    def ask(self, *message: Any) -> Any:
        self.send(*message)
        return self.receive()

    def stop(self) -> None:
        if self.process.is_alive():
            try:
                self.send("close")
            except OSError:
                pass
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _guard(target: Any, pipe: Any, *args: Any) -> None:
    try:
        target(pipe, *args)
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - told to the parent, which raises it
        pipe.send(traceback.format_exc())


# -- a bare fabric ---------------------------------------------------------------------------------------------------


def fabric_child(pipe: Any, nbytes: int) -> None:
    """Owns `nbytes` of registered memory and serves accesses while told to."""
    from kvferry.transfer.nixl import NixlFabric

    memory = np.zeros(nbytes, np.uint8)
    fabric = NixlFabric("child")
    fabric.register([(memory.ctypes.data, nbytes)], "cpu")
    pipe.send((fabric.metadata(), memory.ctypes.data))
    serving = True
    while True:
        while not pipe.poll(0.0005 if serving else None):
            fabric.progress()
        what, *args = pipe.recv()
        if what == "close":
            fabric.close()
            fabric.close()
            return
        if what == "read":
            pipe.send(memory[args[0] : args[1]].tobytes())
        elif what == "fill":
            memory[:] = np.frombuffer(args[0], np.uint8)
            pipe.send(True)
        elif what == "serve":
            serving = args[0]
            pipe.send(True)
        elif what == "renew":
            fabric.renew()
            pipe.send(fabric.metadata())
        elif what == "peer":
            fabric.add_peer(args[0])
            pipe.send(True)


# -- a whole rank ----------------------------------------------------------------------------------------------------


def rank_child(pipe: Any, name: str, role: str, port: int, peers: list[str], mode: str, config: dict[str, Any]) -> None:
    """A rank with its transfer thread. Calls: submit, results, blocks, fill, paint, cpu, open, legs, close.

    `config`: the connector's, and `token_bytes` of one head.
    """
    from kvferry.config import connector_config
    from kvferry.protocol.messages import Layout, Plane
    from kvferry.story import Story
    from kvferry.transfer.areas import Areas
    from kvferry.transfer.channel import ZmqChannel
    from kvferry.transfer.core import TransferCore
    from kvferry.transfer.invariants import check_invariants
    from kvferry.transfer.nixl import NixlFabric
    from kvferry.transfer.peers import Identity
    from kvferry.transfer.thread import TransferThread

    token = config.pop("token_bytes", TOKEN)
    shape = (PLANES, BLOCKS, HEADS * BLOCK * token)
    memory = np.zeros(shape, np.uint8)
    settings = connector_config({"mode": mode, "side_channel_port": port, "peers": peers, **config}, {})
    areas = Areas("cpu", settings.staging_area_bytes)
    threads = set(threading.enumerate())
    fabric = NixlFabric(name)
    fabric.register([(memory.ctypes.data, memory.nbytes), *areas.regions], "cpu")
    planes = tuple(
        Plane(
            base=memory[i].ctypes.data,
            block_stride=shape[2],
            head_stride=BLOCK * token,
            token_bytes=token,
        )
        for i in range(PLANES)
    )
    layout = Layout(
        planes=planes,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        heads=HEADS,
        total_heads=HEADS,
        divisible=False,
        device="cpu",
        fingerprint={"model": "m"},
    )
    transfers = TransferThread(
        lambda deliver: TransferCore(
            Identity(name, 0, 1, role),  # type: ignore[arg-type]
            settings,
            fabric,
            ZmqChannel("127.0.0.1", port),
            layout,
            areas,
            Story(None, role),
            deliver,
        )
    )
    core = transfers._core
    pipe.send("ready")
    while True:
        what, *args = pipe.recv()
        if what == "submit":
            transfers.submit(args[0])
        elif what == "results":  # at least args[0] of them
            got = []
            until = time.monotonic() + args[1]
            while len(got) < args[0] and time.monotonic() < until:
                transfers.wait(max(0.0, until - time.monotonic()))
                got += transfers.results()
            pipe.send(got)
        elif what == "up":  # connected to args[0] peers
            until = time.monotonic() + WAIT_S
            while sum(p.stage.name == "UP" for p in list(core._peers.by_key.values())) < args[0]:
                assert time.monotonic() < until, "not connected"
                time.sleep(0.01)
            pipe.send(True)
        elif what == "fill":
            memory[:] = np.random.default_rng(args[0]).integers(1, 255, shape, np.uint8)
            pipe.send(True)
        elif what == "paint":
            memory[:] = args[0]
            pipe.send(True)
        elif what == "is painted":
            pipe.send(bool((memory == args[0]).all()))
        elif what == "ups":
            pipe.send(len(core._peers.up_keys()))
        elif what == "ways":  # by whom each D rank pulls from here
            pipe.send([way.by for way in core._pulls._ways.values()])
        elif what == "legs":  # registrations that P holds
            pipe.send(len(core._rendezvous._by_leg))
        elif what == "blocks":
            pipe.send(memory[:, list(args[0])].tobytes())
        elif what == "others":  # sum over blocks that nothing may have touched
            pipe.send(int(memory[:, [b for b in range(BLOCKS) if b not in args[0]]].sum()))
        elif what == "cpu":
            before = time.process_time()
            time.sleep(args[0])
            pipe.send(time.process_time() - before)
        elif what == "open":
            pipe.send(core.open_counts())
        elif what == "close":
            held = [n for what, n in core.open_counts().items() if what != "peers"]
            check_invariants(core, idle=not any(held))
            transfers.close()
            transfers.close()
            leaked = [one.name for one in set(threading.enumerate()) - threads]
            pipe.send(leaked)
            return


# -- one that lies ---------------------------------------------------------------------------------------------------


def liar_child(pipe: Any, p_port: int, d_port: int, what: str) -> None:
    """Greets P as a decode rank, and registers for transfer 'stolen'. Its layout is that of D at `d_port`: beyond what
    its own agent has registered; or the agent is said to be P's own, whose metadata `Welcome` brings. Calls: heard."""
    import zmq

    from kvferry.protocol import codec
    from kvferry.protocol import messages as wire
    from kvferry.transfer.nixl import NixlFabric

    context = zmq.Context()

    def dial(port: int) -> Any:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    memory = np.zeros(1 << 16, np.uint8)
    fabric = NixlFabric("liar")
    fabric.register([(memory.ctypes.data, memory.nbytes)], "cpu")
    heard: list[Any] = []

    def hear(socket: Any, kind: type | None, seconds: float = WAIT_S) -> Any:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            notes.extend(note for _, note in fabric.progress())
            if socket.poll(2) and (data := socket.recv()):
                heard.append(codec.decode(data))
                if type(heard[-1]) is kind:
                    return heard[-1]
        assert kind is None, f"no {kind}: {heard}"
        return None

    notes: list[bytes] = []
    asker = dial(d_port)
    asker.send(codec.encode(wire.Inspect()))
    layout = hear(asker, wire.Inspection).layout
    facts = dict(
        life=1, engine_id="liar", rank=0, tp_size=1, layout=layout, silence_s=30.0, pull_by="auto", dialled="x"
    )
    own = dict(agent=fabric.metadata(), scratch=memory.ctypes.data)
    p = dial(p_port)
    p.send(codec.encode(wire.Hello(**facts, **own)))
    welcome = hear(p, wire.Welcome)
    if "agent" in what:
        p = dial(p_port)
        lie = dict(life=2, agent=welcome.agent, scratch=welcome.scratch, layout=welcome.layout)
        p.send(codec.encode(wire.Hello(**{**facts, **own, **lie})))
        hear(p, None, 1.0)
        echo = b"0" * 16
    else:
        while not notes:
            hear(p, None, 0.05)
        echo = notes[-1]
    p.send(codec.encode(wire.Warm(echo=echo)))
    ids = (3, 4)
    tokens = len(ids) * BLOCK
    p.send(
        codec.encode(
            wire.Register(
                reg_id=1,
                transfer_id="stolen",
                mode="push",
                start_token=0,
                end_token=tokens,
                block_ids=ids,
                legs=1,
                credit=1,
            )
        )
    )
    hear(p, None, 0.3)
    pipe.send("said")
    while pipe.recv() != ("close",):
        hear(p, None, 0.5)
        pipe.send([type(one).__name__ for one in heard])
    for one in (asker, p):
        one.close()
    fabric.close()
