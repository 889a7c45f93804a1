"""Prompts as the router sees them, and what engines' caches are thought to hold: by what was sent, by KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.cache import SentPrompts
from kvferry.router.choice.kv_events import BadEvents, CachedBlocks
from kvferry.router.choice.rank import Rank
from kvferry.router.requests.prompt import BLOCK_TOKENS, PART_TOKENS, Prompt


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def shared(one: Prompt, other: Prompt) -> int:
    pairs = zip(one.block_keys(), other.block_keys(), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.block_keys()), len(other.block_keys())))


@pytest.mark.parametrize(
    ("body", "tokens", "exact"),
    [
        ({"prompt": ids(130)}, 130, True),
        ({"prompt": [ids(130)]}, 130, True),
        ({"token_ids": ids(7)}, 7, True),
        ({"prompt": "a" * 40}, 10, False),
        ({"prompt": ["a" * 40]}, 10, False),
        ({"input": "a" * 40}, 10, False),
        ({"prompt": ""}, 0, False),
        ({}, 0, False),
        ({"prompt": [1.5, "x"]}, 0, False),
        ({"prompt": 7, "cache_salt": ["?"]}, 0, False),
        ({"messages": ["?", {"role": 1, "content": {"a": 1}}]}, 3 + PART_TOKENS, False),
    ],
)
def test_how_long_a_prompt_is(body: dict[str, Any], tokens: int, exact: bool) -> None:
    prompt = Prompt(body)
    assert (prompt.tokens, prompt.exact) == (tokens, exact)


def test_keys_are_shared_as_far_as_blocks_are() -> None:
    base = Prompt({"prompt": ids(300)})
    assert len(base.block_keys()) == 300 // BLOCK_TOKENS
    assert shared(base, Prompt({"prompt": [*ids(200), *ids(200, 900)]})) == 200 // BLOCK_TOKENS
    assert shared(base, Prompt({"prompt": ids(300, 1)})) == 0
    assert shared(base, Prompt({"prompt": ids(300), "model": "lora"})) == 0
    assert shared(base, Prompt({"prompt": ids(300), "cache_salt": "mine"})) == 0


def test_a_conversation_shares_what_was_said_before() -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "x" * 600}, {"role": "user", "content": "y" * 600}]
    first = Prompt({"messages": turns})
    later = Prompt(
        {"messages": [*turns, {"role": "assistant", "content": "z"}, {"role": "user", "content": "w" * 900}]}
    )
    assert shared(first, later) == len(first.block_keys()) >= 4
    assert shared(first, Prompt({"messages": turns, "tools": [{"type": "function"}]})) == 0


def test_another_image_is_another_prompt() -> None:
    def chat(url: str) -> Prompt:
        parts = [{"type": "text", "text": "a" * 512}, {"type": "image_url", "image_url": {"url": url}}]
        return Prompt({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "b" * 512}]}]})

    one, other = chat("data:" + "A" * 100_000), chat("data:" + "B" * 100_000)
    assert shared(one, one) == len(one.block_keys()) and 0 < shared(one, other) < len(one.block_keys())
    assert one.tokens < 2 * PART_TOKENS, "an image's bytes are no tokens"


# -- by what was sent


def test_sent_prompts_lose_the_oldest_and_their_ends_first() -> None:
    now = [0.0]
    cache = SentPrompts(8 * BLOCK_TOKENS, clock=lambda: now[0])
    old, new = Prompt({"prompt": ids(5 * 64)}), Prompt({"prompt": ids(5 * 64, 1000)})
    assert cache.matched(old) == 0
    cache.sent(old)
    assert cache.matched(old) == 5 * 64 and cache.matched(Prompt({"prompt": ids(3 * 64 + 9)})) == 3 * 64
    now[0] = 10.0
    cache.sent(new)
    assert (cache.matched(new), cache.matched(old), len(cache)) == (5 * 64, 3 * 64, 8)
    assert (cache.matched(new, 1.0), cache.matched(old, 1.0)) == (5 * 64, 0)
    cache.sent(old)
    assert (cache.matched(old), cache.matched(new)) == (5 * 64, 3 * 64)


# -- by KV events


def stored(hashes: list[bytes], parent: bytes | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None} | more


class Publisher:
    def __init__(self) -> None:
        self.blocks = CachedBlocks()
        self.number = 0

    def send(self, *events: Any, number: int | None = None) -> None:
        self.number = self.number if number is None else number
        self.blocks.take(self.number, msgspec.msgpack.encode([1.0, events, 0]))
        self.number += 1

    def holds(self, tokens: list[int], lora: str = "", **more: Any) -> int | None:
        return self.blocks.matched(Prompt({"prompt": tokens} | more), lora)


def test_stored_and_removed_blocks() -> None:
    engine = Publisher()
    engine.send(stored([b"1", b"2"], None, ids(32)))
    engine.send(stored([b"3"], b"2", ids(16, 32)), stored([b"9"], b"unknown", ids(16, 64)))
    assert len(engine.blocks) == 3
    assert [engine.holds(ids(count)) for count in (15, 16, 47, 48, 200)] == [0, 16, 32, 48, 48]
    assert engine.holds(ids(48, 1)) == 0
    engine.send({"type": "BlockRemoved", "block_hashes": [b"2"], "medium": "GPU"})
    assert engine.holds(ids(200)) == 16
    engine.send(stored([b"2"], b"1", ids(16, 16)))
    assert engine.holds(ids(200)) == 48
    engine.send({"type": "AllBlocksCleared"})
    assert engine.holds(ids(200)) == 0 and len(engine.blocks) == 0


def test_events_as_lists_and_with_numbers_for_hashes() -> None:
    engine = Publisher()
    engine.send(["BlockStored", [1, 2], None, ids(32), 16, None, "GPU"])
    assert engine.holds(ids(40)) == 32
    engine.send(["BlockRemoved", [2], "GPU"])
    assert engine.holds(ids(40)) == 16
    engine.send(["AllBlocksCleared"])
    assert engine.holds(ids(40)) == 0


def test_what_counts_is_this_models_kv_on_the_device() -> None:
    engine = Publisher()
    engine.send(
        stored([b"c"], None, ids(16, 100), medium="CPU"),
        stored([b"l"], None, ids(16), lora_name="l", extra_keys=[["l"]]),
        stored([b"m", b"n"], None, ids(32, 200), extra_keys=[None, [["image", 3]]]),
    )
    assert engine.holds(ids(16, 100)) == 0
    assert (engine.holds(ids(16)), engine.holds(ids(16), "l")) == (0, 16)
    assert engine.holds(ids(32, 200)) == 16
    assert engine.holds(ids(16), cache_salt="s") is None, "its own salt is another block"
    assert engine.blocks.matched(Prompt({"prompt": "text"}), "") is None, "text is not tokenized here"


def test_a_gap_or_a_new_life_forgets() -> None:
    engine = Publisher()
    engine.send(stored([b"1"], None, ids(16)))
    engine.send(stored([b"2"], None, ids(16, 50)), number=7)
    assert (engine.holds(ids(16)), engine.holds(ids(16, 50))) == (0, 16)
    engine.send(number=0)
    assert engine.holds(ids(16, 50)) == 0


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]),
     msgspec.msgpack.encode([1.0, [stored([b"1"], None, ["x"])]]),  # type: ignore[list-item]
     msgspec.msgpack.encode([1.0, [stored([b"1"], None, ids(4), block_size=0)]])],
)  # fmt: skip
def test_what_is_no_batch_forgets_too(payload: bytes) -> None:
    engine = Publisher()
    engine.send(stored([b"1"], None, ids(16)))
    with pytest.raises(BadEvents):
        engine.blocks.take(1, payload)
    assert engine.holds(ids(16)) == 0
    engine.send(stored([b"1"], None, ids(16)), number=2)
    assert engine.holds(ids(16)) == 16


def test_a_rank_takes_events_before_what_was_sent_but_for_the_last_moments() -> None:
    told, silent = Rank(10_000, True), Rank(10_000, False)
    prompt = Prompt({"prompt": ids(640)})
    ask = Ask(tokens=640, prompt=prompt)
    for rank in (told, silent):
        assert rank.matched(ask) == 0
        rank.sent.sent(prompt)
        assert rank.matched(ask) == 639, "the last token is computed in any case"
    told.sent.clear()
    assert told.blocks is not None
    told.blocks.take(0, msgspec.msgpack.encode([1.0, [stored([b"1"], None, ids(16))]]))
    assert told.matched(ask) == 16
    told.forget()
    assert told.matched(ask) == 0
    silent.caches = False
    assert silent.matched(ask) == 0
    text = Prompt({"prompt": "a" * 2560})
    told.sent.sent(text)
    assert told.matched(Ask(tokens=320, prompt=text)) == 319, "scaled to what a token of this text is"
