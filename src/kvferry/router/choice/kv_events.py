"""vLLM's KV cache events: what a rank's prefix cache holds, as the engine itself tells it.

An engine started with `--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'` publishes, for each
step that changed its cache, one message of three parts: topic, sequence number (8 bytes, big endian), and a msgpack
batch `[time, events, data-parallel rank]`. Rank r publishes on the given port + r. Events name blocks by vLLM's own
hashes, which the router can't compute; but a stored block comes with its token ids and its parent, from which follow
the keys of `prompt.py`. So prompts of token ids are found exactly. A prompt of text is not: it is not tokenized here.

Owner: the event loop. One task per rank reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvferry.errors import KVFerryError
from kvferry.router.requests.prompt import TOKEN_BYTES, Prompt, chain, raw_ids
from kvferry.transfer.inquiry import endpoint

log = logging.getLogger("kvferry.router")

MOST_BLOCKS = 1 << 20
"""More than any engine has; whoever publishes that many is no engine."""
_ON_DEVICE = (None, "GPU")
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_REMOVED = ("block_hashes", "medium")


class BadEvents(KVFerryError):
    """Not what vLLM publishes."""

    code = "bad_kv_events"


class CachedBlocks:
    """The blocks in one rank's device memory."""

    def __init__(self) -> None:
        self._key_of: dict[bytes | int, int] = {}
        self._count: dict[int, int] = {}
        self._sizes: set[int] = set()
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._key_of)

    def matched(self, prompt: Prompt, lora: str) -> int | None:
        """Leading tokens of `prompt` that are there; None where that can't be told."""
        if not prompt.exact or not prompt.plain:
            return None
        most = 0
        for size in self._sizes:
            count = 0
            for key in prompt.block_keys(size, _root(size, lora)):
                if key not in self._count:
                    break
                count += 1
            most = max(most, count * size)
        return most

    def clear(self) -> None:
        self._key_of.clear()
        self._count.clear()
        self._sizes.clear()

    def take(self, number: int, payload: bytes) -> None:
        """One batch. After a gap, or when numbers begin anew, what was known before is forgotten. Raises `BadEvents`,
        having forgotten everything too."""
        if self._next is not None and number != self._next:
            self.clear()
        self._next = number + 1
        try:
            batch = msgspec.msgpack.decode(payload)
            for event in batch[1]:
                self._apply(event)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError) as error:
            self.clear()
            raise BadEvents(f"no batch of KV events: {type(error).__name__}: {error}") from None
        if len(self._key_of) > MOST_BLOCKS:
            self.clear()
            raise BadEvents(f"more than {MOST_BLOCKS} blocks")

    def _apply(self, event: dict[str, Any] | Sequence[Any]) -> None:
        """vLLM sends a map with the event's name under `type`; it used to send a list that begins with it."""
        if isinstance(event, dict):
            kind, fields = event["type"], event
        else:
            kind = event[0]
            names = _REMOVED if kind == "BlockRemoved" else _STORED
            fields = dict(zip(names, event[1:], strict=False))
        if kind == "AllBlocksCleared":
            self.clear()
        elif kind == "BlockStored" and fields.get("medium") in _ON_DEVICE and not fields.get("group_idx"):
            self._store(fields)
        elif kind == "BlockRemoved" and fields.get("medium") in _ON_DEVICE and not fields.get("group_idx"):
            for block in fields["block_hashes"]:
                self._remove(block)

    def _store(self, fields: dict[str, Any]) -> None:
        size, lora, parent = int(fields["block_size"]), fields.get("lora_name") or "", fields.get("parent_block_hash")
        if size < 1:
            raise ValueError(f"block_size {size}")
        key = _root(size, lora) if parent is None else self._key_of.get(parent)
        if key is None:
            return  # its parent was stored before we listened
        self._sizes.add(size)
        extras = fields.get("extra_keys") or ()
        keys = chain(key, raw_ids(fields["token_ids"]), size * TOKEN_BYTES)
        for at, (block, key) in enumerate(zip(fields["block_hashes"], keys, strict=False)):
            if at < len(extras) and any(extra != lora for extra in extras[at] or ()):
                return  # an image, or a cache salt: not the same KV for the same ids
            self._remove(block)
            self._key_of[block] = key
            self._count[key] = self._count.get(key, 0) + 1

    def _remove(self, block: bytes | int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]


def _root(size: int, lora: str) -> int:
    return hash(("kv", size, lora))


async def listen(host: str, port: int, blocks: CachedBlocks) -> None:
    """Keep `blocks` as the rank that publishes there says, until cancelled. ZMQ connects again by itself."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.linger = 0
    socket.ipv6 = ":" in host
    socket.subscribe(b"")
    warned = ""
    try:
        socket.connect(endpoint(host, port))
        while True:
            parts = await socket.recv_multipart()
            try:
                if len(parts) != 3 or len(parts[1]) != 8:
                    raise BadEvents(f"{len(parts)} parts, expected topic, number and batch")
                blocks.take(int.from_bytes(parts[1], "big"), parts[2])
            except BadEvents as error:
                if str(error) != warned:
                    log.warning("KV events from %s:%d: %s", host, port, error)
                warned = str(error)
    finally:
        socket.close()
