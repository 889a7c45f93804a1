"""KV memory made by torch holds the same bytes as the plain one. On CPU here; on a GPU where there is one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvferry.engine.content import prefixes
from kvferry.engine.memory import KvMemory
from kvferry.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS, BLOCKS, HEADS, BLOCK = 3, 16, range(2, 5), 8


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("cell", [1, 2, 4, 8, 24])
def test_the_same_bytes_and_sums(cell: int, device: str) -> None:
    from kvferry.engine.torch_memory import TorchMemory

    plain = KvMemory(LAYERS, BLOCKS, HEADS, BLOCK, cell)
    other = TorchMemory(LAYERS, BLOCKS, HEADS, BLOCK, cell, device)
    draw = random.Random(cell)
    table = np.array(draw.sample(range(BLOCKS), 9), dtype=np.int64)
    values, at = prefixes([draw.randrange(60_000) for _ in range(70)]), 0
    while at < 70:
        step = draw.choice([1, 5, 8, 20])
        for memory in (plain, other):
            if step == 1:
                memory.write_one_each(table[at // BLOCK : at // BLOCK + 1], np.array([at]), values[at : at + 1])
            else:
                memory.write(table, at, values[at : at + step])
        at += step
    for memory in (plain, other):
        memory.flip(int(table[3]), plain.block_bytes - 1, 0x81)
    assert other.array.cpu().numpy().tobytes() == plain.array.tobytes()
    logical = np.arange(9, dtype=np.int64)
    lengths = np.array([8] * 8 + [6], dtype=np.int64)
    assert (other.sums(table, logical, lengths) == plain.sums(table, logical, lengths)).all()
    mine, theirs = plain.caches(8, {}).layout, other.caches(8, {}).layout
    assert [plane.block_stride for plane in mine.planes] == [plane.block_stride for plane in theirs.planes]
    assert other.block_bytes == plain.block_bytes and other.num_blocks == BLOCKS


def test_a_device_that_is_not_there_is_refused() -> None:
    from kvferry.engine.torch_memory import TorchMemory

    for wrong in ("cuda:99", "gpu"):
        with pytest.raises(ConfigError, match="device"):
            TorchMemory(1, 2, range(1), 8, 8, wrong)
