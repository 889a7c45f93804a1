"""KV events as vLLM's own publisher sends them, over ZMQ, are understood by the router."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvferry.launch.ports import Ports
from kvferry.router.choice.kv_events import CachedBlocks, listen
from kvferry.router.requests.prompt import Prompt

RANK = 1
TOKENS = list(range(64))


async def test_of_a_data_parallel_rank() -> None:
    from vllm.distributed import kv_events

    def stored(hashes: list[Any], parent: Any, tokens: list[int]) -> kv_events.BlockStored:
        facts = {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * len(hashes)}
        return kv_events.BlockStored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=16, **facts
        )

    port = Ports().free(RANK + 1)
    publisher = kv_events.ZmqEventPublisher(RANK, endpoint=f"tcp://*:{port}")
    blocks = CachedBlocks()
    task = asyncio.create_task(listen("127.0.0.1", port + RANK, blocks))

    def publish(*events: kv_events.KVCacheEvent) -> None:
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=list(events)))

    async def until(tokens: int) -> None:
        async with asyncio.timeout(10):
            while blocks.matched(Prompt({"prompt": TOKENS}), "") != tokens:
                await asyncio.sleep(0.01)

    try:
        async with asyncio.timeout(10):
            while not len(blocks):  # what is published before the router has subscribed is lost
                publish(kv_events.AllBlocksCleared(), stored([b"a" * 32, b"b" * 32], None, TOKENS[:32]))
                await asyncio.sleep(0.05)
        publish(stored([b"c" * 32], b"b" * 32, TOKENS[32:48]))
        await until(48)
        removed: list[Any] = [b"b" * 32]
        publish(kv_events.BlockRemoved(block_hashes=removed, medium="GPU"))
        await until(16)
        publish(kv_events.AllBlocksCleared())
        await until(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.shutdown()
