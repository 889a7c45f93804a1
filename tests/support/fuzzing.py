"""Messages that are not quite messages, fast: a million of them take seconds. Seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from wire_examples import EXAMPLES

from kvferry.protocol import codec

_NUMBERS = (0, 1, 2, 16, 17, 1000, 2**31, 2**40, 2**62, 2**64 - 1, -1, -(2**63), 0.0, 1e300, float("nan"), float("inf"))
_OTHERS = ("", "t", "push", "cpu", "cuda:0", "\0", "x" * 600, None, True, False, b"", b"\xff" * 20, [], {}, [[]], [-1])
_HEAD = codec.MAGIC + bytes([codec.VERSION])
_BODIES = [msgspec.msgpack.decode(codec.encode(message)[3:]) for message in EXAMPLES]
_WIRES = [codec.encode(message) for message in EXAMPLES]


def fuzzed(count: int, seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    for _ in range(count):
        yield (_bytes if draw.random() < 0.6 else _fields)(draw)


def _bytes(draw: random.Random) -> bytes:
    """A message with other bytes in it, less of it, more of it, or two in one; now and then mere noise."""
    data = bytearray(draw.choice(_WIRES))
    how = draw.random()
    if how < 0.5:
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif how < 0.65:
        del data[draw.randrange(1, len(data)) :]  # an empty one only asks whether somebody is there
    elif how < 0.8:
        data += draw.randbytes(draw.randint(1, 30))
    elif how < 0.95:
        data[draw.randrange(1, len(data)) :] = draw.choice(_WIRES)[draw.randrange(8) :]
    else:
        data = bytearray(draw.randbytes(draw.randint(1, 200)))
    return bytes(data)


def _fields(draw: random.Random) -> bytes:
    """A message with other values in it; some of those are well formed."""
    body: dict[str, Any] = dict(draw.choice(_BODIES))
    for _ in range(draw.randint(1, 2)):
        value = draw.choice(_NUMBERS) if draw.random() < 0.6 else draw.choice(_OTHERS)
        body[draw.choice(list(body)) if draw.random() < 0.95 else "novelty"] = value
    return _HEAD + msgspec.msgpack.encode(body)
