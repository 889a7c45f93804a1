"""The engine loop with real ranks: right answers under batching, chunking, caching, preemption, and in any TP size."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from engine_loops import LoopUnderTest, config, prompts

from kvferry.engine.pool import BlockPool
from kvferry.errors import ConfigError, InvariantBroken


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"byte_scale": 8},
        {"max_num_batched_tokens": 33, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "block_size": 7},
        {"fragmentation": 0.7},
        {"num_blocks": 64, "max_model_len": 1024, "max_num_seqs": 12},
    ],
    ids=str,
)
def test_random_requests_get_their_answers(changes: dict[str, Any]) -> None:
    asked = prompts(60, seed=len(changes))
    with LoopUnderTest(config(**changes)) as engine:
        for index, prompt in enumerate(asked):
            engine.ask(str(index), prompt, 1 + index % 40)
        engine.wait()
        for index, prompt in enumerate(asked):
            assert engine.tokens[str(index)] == engine.right(prompt, 1 + index % 40)
        assert engine.loop.stats().kv_usage == 0


def test_a_small_pool_preempts_and_answers_stay_right() -> None:
    with LoopUnderTest(config(num_blocks=24, max_model_len=384, max_num_seqs=12)) as engine:
        asked = prompts(12, seed=5, lengths=(20, 40))
        asked = [prompt[:64] for prompt in asked]
        for index, prompt in enumerate(asked):
            engine.ask(str(index), prompt, 60)
        engine.wait()
        assert engine.loop.stats().counts.preemptions > 0
        for index, prompt in enumerate(asked):
            assert engine.tokens[str(index)] == engine.right(prompt, 60)


@pytest.mark.parametrize(("tp", "byte_scale"), [(2, 1), (8, 1), (4, 8)])
def test_ranks_in_processes_answer_as_one(tp: int, byte_scale: int) -> None:
    asked = prompts(20, seed=tp)
    with LoopUnderTest(config(tp=tp, byte_scale=byte_scale)) as engine:
        for index, prompt in enumerate(asked):
            engine.ask(str(index), prompt, 10)
        engine.wait()
        assert all(engine.tokens[str(i)] == engine.right(prompt, 10) for i, prompt in enumerate(asked))


def test_a_prompt_seen_before_is_found_and_read() -> None:
    [prompt] = prompts(1, seed=9, lengths=(200,))
    with LoopUnderTest(config()) as engine:
        engine.ask("first", prompt, 5)
        engine.wait()
        engine.ask("second", prompt, 5)
        engine.wait()
        assert engine.last["second"].num_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert engine.tokens["second"] == engine.tokens["first"] == engine.right(prompt, 5)


def test_a_block_corrupted_in_the_cache_changes_the_next_answer() -> None:
    prompt = list(range(1000, 1100))
    with LoopUnderTest(config()) as engine:
        engine.ask("first", prompt, 4)
        engine.wait()
        engine.loop.inject({"kind": "corrupt", "block": 2, "offset": 5})
        engine.ask("second", prompt, 4)
        engine.wait()
        assert engine.tokens["first"] == engine.right(prompt, 4)
        assert engine.tokens["second"] != engine.tokens["first"]


def test_a_block_corrupted_while_it_is_used_changes_the_rest() -> None:
    prompt = list(range(1000, 1160))
    with LoopUnderTest(config()) as engine:
        engine.ask("one", prompt, 4000)
        while len(engine.tokens["one"]) < 5:
            engine.take()
        engine.loop.inject({"kind": "corrupt", "block": 3, "offset": 1})
        engine.wait()
        right = engine.right(prompt, 40)
        assert engine.tokens["one"][:5] == right[:5]
        assert engine.tokens["one"][-1:] != [] and len(engine.tokens["one"]) == 4000
        again = engine.tokens["one"]
        engine.loop.inject({"kind": "clear"})
        engine.ask("two", [*range(2000, 2160)], 4)
        engine.wait()
        assert engine.tokens["two"] == engine.right([*range(2000, 2160)], 4)
        # From some token on nothing follows from what came before.
        at = len(prompt) + 3000
        assert engine.right([*prompt, *again][:at], 1) != again[3000:3001]


def test_the_first_end_token_ends_unless_told_otherwise() -> None:
    with LoopUnderTest(config()) as engine:
        for index in range(12):
            engine.ask(str(index), [300 + index], 2000, ignore_eos=False)
        engine.ask("least", [300], 2000, ignore_eos=False, min_tokens=1500)
        stop = engine.right([900, 901], 30)[20]
        engine.ask("stop", [900, 901], 30, stop_token_ids=frozenset({stop}))
        engine.wait()
        stopped = [name for name in map(str, range(12)) if engine.last[name].finish_reason == "stop"]
        assert len(stopped) >= 10  # (127/128)^2000: practically all
        assert all(engine.tokens[name][-1] == 2 and 2 not in engine.tokens[name][:-1] for name in stopped)
        assert len(engine.tokens["least"]) >= 1500
        assert engine.tokens["stop"] == engine.right([900, 901], 30)[:21]
        assert engine.last["stop"].finish_reason == "stop" and engine.last["stop"].stop_token == stop


def test_an_aborted_request_ends_and_leaves_nothing() -> None:
    with LoopUnderTest(config("smollm2-cpu")) as engine:
        engine.ask("gone", range(300, 400), 3000)
        engine.take()
        engine.loop.abort("gone")
        engine.loop.abort("never seen")
        engine.wait()
        assert engine.last["gone"].finish_reason == "abort"
        engine.ask("next", [1, 2, 3], 2)
        engine.wait()
        assert engine.loop.stats().kv_usage == 0


def test_a_step_takes_what_the_profile_says() -> None:
    with LoopUnderTest(config("smollm2-cpu")) as engine:
        began = time.monotonic()
        engine.ask("one", range(256, 756), 11)
        engine.wait()
        took = time.monotonic() - began
    modelled = (32 + 500 * 1.4 + 10 * 32.8) / 1e3
    assert modelled <= took < modelled + 0.15


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"byte_scale": 3}, "byte_scale: 3"),
        ({"tp": 3}, "tensor_parallel_size: 3"),
        ({"fragmentation": 2.0}, "fragmentation: 2.0"),
        ({"num_blocks": 4}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
    ],
)
def test_what_cannot_be_started_says_so(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoopUnderTest(config(**changes))


def test_a_fault_that_is_none_is_refused() -> None:
    with LoopUnderTest(config()) as engine:
        for wrong, said in (
            ({"kind": "explode"}, "kinds: freeze"),
            ({"kind": "freeze", "seconds": -1}, "seconds"),
            ({"kind": "drop", "message": "Nothing"}, "Landed"),
            ({"kind": "corrupt", "block": 10**6}, "blocks"),
            ({"kind": "slow_link", "factr": 2}, "factr"),
        ):
            with pytest.raises(ConfigError, match=said):
                engine.loop.inject(wrong)


def test_a_block_that_is_lost_ends_an_engine_that_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = prompts(1, seed=3, lengths=(90,))
    with LoopUnderTest(config(debug_invariants=True)) as engine:
        engine.ask("well", prompt, 3)
        engine.wait()
        assert engine.loop.death is None
        give_back = BlockPool.give_back
        monkeypatch.setattr(BlockPool, "give_back", lambda pool, blocks: give_back(pool, blocks[1:]))
        monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the engine thread raises it
        engine.ask("leaks", prompt, 3)
        engine.wait()
        engine.loop._thread.join(5)
        assert isinstance(engine.loop.death, InvariantBroken)
        assert "has 0 requests and 1 holders" in str(engine.loop.death)
