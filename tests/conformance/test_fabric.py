"""What every fabric must do, over memory and over real NIXL (the target in a process of its own)."""

from __future__ import annotations

import time

import numpy as np
import pytest
from nixl_tier import Child, fabric_child

from kvferry.errors import FabricError
from kvferry.transfer.memory import MemoryWorld

SIZE = 1 << 20


class MemoryTarget:
    """The other side in this process; `drive` is its share of the work."""

    def __init__(self, world):
        self.memory = np.zeros(SIZE, np.uint8)
        self.fabric = world.fabric("target")
        self.fabric.register([(self.memory.ctypes.data, SIZE)], "cpu")
        self.metadata, self.address = self.fabric.metadata(), self.memory.ctypes.data
        self.serving = True

    def drive(self):
        if self.serving:
            self.fabric.progress()

    def renew(self):
        self.fabric.renew()
        self.metadata = self.fabric.metadata()

    def read(self, start, end):
        return self.memory[start:end].tobytes()

    def fill(self, data):
        self.memory[:] = np.frombuffer(data, np.uint8)

    def serve(self, on):
        self.serving = on

    def peer(self, metadata):
        self.fabric.add_peer(metadata)

    def close(self):
        self.fabric.close()


class NixlTarget:
    def __init__(self):
        self.child = Child(fabric_child, SIZE)
        self.metadata, self.address = self.child.receive()

    def drive(self):
        pass  # it drives itself

    def read(self, start, end):
        return self.child.ask("read", start, end)

    def fill(self, data):
        self.child.ask("fill", data)

    def serve(self, on):
        self.child.ask("serve", on)

    def peer(self, metadata):
        self.child.ask("peer", metadata)

    def renew(self):
        self.metadata = self.child.ask("renew")

    def close(self):
        self.child.stop()
        assert self.child.process.exitcode == 0


class Sides:
    def __init__(self, fabric, target):
        self.fabric, self.target = fabric, target
        self.memory = np.zeros(SIZE, np.uint8)
        fabric.register([(self.memory.ctypes.data, SIZE)], "cpu")
        self.peer = fabric.add_peer(target.metadata)
        target.peer(fabric.metadata())

    def post(self, op, rows):
        """rows: (offset here, offset there, bytes)"""
        table = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        base, there = np.uint64(self.memory.ctypes.data), np.uint64(self.target.address)
        return self.fabric.post(op, self.peer, table[:, 0] + base, table[:, 1] + there, table[:, 2].copy(), "cpu")

    def finish(self, handle, limit_s=20.0):
        until = time.monotonic() + limit_s
        while not self.fabric.check(handle):
            self.target.drive()
            assert time.monotonic() < until, "never completed"
        self.fabric.release(handle)


@pytest.fixture(scope="module")
def nixl_sides():
    pytest.importorskip("nixl_cu12")
    from kvferry.transfer.nixl import NixlFabric

    made = Sides(NixlFabric("here"), NixlTarget())
    yield made
    made.fabric.close()
    made.fabric.close()  # idempotent
    made.target.close()


@pytest.fixture
def memory_sides():
    world = MemoryWorld()
    made = Sides(world.fabric("here"), MemoryTarget(world))
    yield made
    made.fabric.close()
    made.fabric.close()  # idempotent
    made.target.close()
    assert world.copies == [] and world.fabrics == {}


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def sides(request):
    return request.getfixturevalue(f"{request.param}_sides")


def random_bytes(seed):
    return np.random.default_rng(seed).integers(0, 255, SIZE, np.uint8)


def test_write_then_read_back(sides):
    sides.memory[:] = random_bytes(1)
    sides.finish(sides.post("WRITE", [(0, 0, SIZE)]))
    assert sides.target.read(0, SIZE) == sides.memory.tobytes()
    theirs = random_bytes(2)
    sides.target.fill(theirs.tobytes())
    sides.finish(sides.post("READ", [(0, 0, SIZE)]))
    assert (sides.memory == theirs).all()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_scattered_descriptors_are_byte_exact(sides, op):
    rng = np.random.default_rng(3)
    here, there = (rng.permutation(256) * 4096 for _ in range(2))
    sizes = rng.integers(1, 4096, 256)
    mine, theirs = random_bytes(4), random_bytes(5)
    sides.memory[:] = mine
    sides.target.fill(theirs.tobytes())
    sides.finish(sides.post(op, np.column_stack((here, there, sizes))))
    source, result = (mine, theirs) if op == "WRITE" else (theirs, mine)
    result = result.copy()
    for a, b, n in zip(here, there, sizes, strict=True):
        start, end = (a, b) if op == "WRITE" else (b, a)
        result[end : end + n] = source[start : start + n]
    got = sides.target.read(0, SIZE) if op == "WRITE" else sides.memory.tobytes()
    assert got == result.tobytes()


def test_many_handles_in_flight(sides):
    sides.memory[:] = random_bytes(6)
    handles = [sides.post("WRITE", [(i * 4096, i * 4096, 4096)]) for i in range(50)]
    for handle in reversed(handles):
        sides.finish(handle)
    assert sides.target.read(0, 50 * 4096) == sides.memory[: 50 * 4096].tobytes()


def test_unregistered_memory_cannot_be_posted(sides):
    with pytest.raises(FabricError):
        sides.post("WRITE", [(0, 1 << 40, 64)])
    sides.finish(sides.post("WRITE", [(0, 0, 64)]))  # and does no harm


def test_unknown_peer_cannot_be_posted_to(sides):
    sides.peer, known = "nobody", sides.peer
    with pytest.raises(FabricError):
        sides.post("WRITE", [(0, 0, 64)])
    sides.peer = known


def test_removed_peer_cannot_be_posted_to_and_may_come_back(sides):
    sides.finish(sides.post("WRITE", [(0, 0, 64)]))
    sides.fabric.remove_peer(sides.peer)
    sides.fabric.remove_peer(sides.peer)
    sides.fabric.remove_peer("nobody")
    with pytest.raises(FabricError):
        sides.post("WRITE", [(0, 0, 64)])
    sides.memory[:64] = 9
    sides.peer = sides.fabric.add_peer(sides.target.metadata)
    sides.finish(sides.post("WRITE", [(0, 0, 64)]))
    assert sides.target.read(0, 64) == b"\t" * 64


def test_garbage_metadata_is_refused(sides):
    with pytest.raises(FabricError):
        sides.fabric.add_peer(b"garbage")


def test_target_must_be_driven(sides):
    """Why `progress` is part of the seam: over TCP nothing lands in a process that does not drive its agent."""
    sides.finish(sides.post("WRITE", [(0, 0, 64)]))
    sides.target.serve(False)
    sides.memory[:] = 7
    handle = sides.post("READ", [(0, 0, 64)])
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert not sides.fabric.check(handle)
    sides.target.serve(True)
    sides.finish(handle)


def test_release_while_in_flight(sides):
    sides.target.serve(False)
    handle = sides.post("WRITE", [(0, 0, SIZE)])
    sides.fabric.release(handle)
    sides.target.serve(True)
    sides.finish(sides.post("WRITE", [(0, 0, 64)]))


def test_write_that_completed_is_visible(sides):
    for i in range(1, 30):
        sides.memory[:4096] = i
        sides.finish(sides.post("WRITE", [(0, 0, 4096)]))
        assert sides.target.read(4032, 4096) == bytes([i]) * 64


def test_a_released_copy_goes_on(sides):
    """Neither a release nor the removal of its peer calls a WRITE back."""
    sides.memory[:] = 0x77
    sides.target.serve(False)
    handle = sides.post("WRITE", [(0, 0, SIZE)])
    sides.fabric.release(handle)
    sides.fabric.remove_peer(sides.peer)
    sides.target.serve(True)
    until = time.monotonic() + 10
    while sides.target.read(SIZE - 64, SIZE) != b"\x77" * 64:
        assert time.monotonic() < until, "it was called back"
        sides.target.drive()
        sides.fabric.progress()
    sides.peer = sides.fabric.add_peer(sides.target.metadata)


def test_nothing_reaches_an_agent_that_was_renewed(sides):
    sides.memory[:] = 0x55
    sides.finish(sides.post("WRITE", [(0, 0, SIZE)]))
    sides.memory[:] = 0x66
    sides.target.serve(False)
    late = sides.post("WRITE", [(0, 0, SIZE)])
    old = sides.target.metadata
    sides.target.renew()
    assert sides.target.metadata != old
    sides.target.serve(True)
    ended = False
    until = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < until, "it never ended"
        sides.target.drive()
        try:
            assert not sides.fabric.check(late), "it was told to be complete"
        except FabricError:
            ended = True
    sides.fabric.release(late)
    assert sides.target.read(0, SIZE) == b"\x55" * SIZE
    sides.fabric.remove_peer(sides.peer)
    sides.peer = sides.fabric.add_peer(sides.target.metadata)
    sides.target.peer(sides.fabric.metadata())
    sides.finish(sides.post("WRITE", [(0, 0, SIZE)]))
    assert sides.target.read(0, SIZE) == b"\x66" * SIZE
