"""The mixed workload, how its runs are judged, and arguments for one engine and for the router."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bench_parts import job, run, sample, told

from kvferry.bench.judge import answers, engines
from kvferry.bench.load_builtin import asked_of
from kvferry.bench.measure import Rules
from kvferry.bench.mix import CONVERSATIONS, SYSTEM_PROMPTS, longest, mixed
from kvferry.bench.target import Setup
from kvferry.bench.workload import ModelFacts
from kvferry.errors import ConfigError
from kvferry.launch.spec import DeploymentSpec, engine_args

WORDS = ModelFacts(np.arange(1000, 9000), 1)
LENGTH = 64


def test_the_mix_has_what_it_says() -> None:
    asked = mixed(WORDS, 7, LENGTH, 1000)
    lengths = Counter(len(one.tokens) for one in asked if not one.session)
    assert set(lengths) == {LENGTH // 4, LENGTH + LENGTH // 4, 2 * LENGTH}
    assert [round(lengths[size], -2) for size in (16, 80, 128)] == [500, 300, 100] or lengths[16] in range(400, 500)
    begins = Counter(tuple(one.tokens[:LENGTH]) for one in asked if len(one.tokens) == 80 and not one.session)
    assert len(begins) == SYSTEM_PROMPTS and begins.most_common(1)[0][1] > 2 * min(begins.values())
    assert max(len(one.tokens) for one in asked) <= longest(LENGTH)


def test_each_turn_begins_with_the_one_before() -> None:
    last: dict[str, list[int]] = {}
    for one in mixed(WORDS, 7, LENGTH, 1000):
        if one.session:
            before = last.get(one.session)
            if before is None:
                assert len(one.tokens) == LENGTH
            else:
                assert one.tokens[: len(before)] == before and len(one.tokens) == len(before) + LENGTH // 4
            last[one.session] = one.tokens
    assert len(last) > CONVERSATIONS


def test_it_follows_from_the_seed() -> None:
    assert mixed(WORDS, 7, LENGTH, 50) == mixed(WORDS, 7, LENGTH, 50) != mixed(WORDS, 8, LENGTH, 50)
    asked = asked_of(job(words=WORDS, kind="mixed", num=50, input_len=LENGTH, seed=7))
    assert asked == mixed(WORDS, 7, LENGTH, 50)
    assert all(len(one.tokens) == 41 and not one.session for one in asked_of(job(words=WORDS)))


def test_a_mixed_run_may_find_prefixes_on_prefill_only() -> None:
    hits = {"local_cache_hit": 10.0, "local_compute": 1.0}
    at_prefill, at_decode = told(by_role={"prefill": hits}), told(by_role={"decode": hits})
    assert engines(at_prefill, 10.0, prefixes=True) == []
    assert [reason.kind for reason in engines(at_prefill, 10.0)] == ["cache"]
    assert [reason.kind for reason in engines(at_decode, 10.0, prefixes=True)] == ["cache"]


def test_lengths_of_a_mixed_run_are_each_ones_own() -> None:
    samples = [sample(0), sample(1, input_len=99, prompt_tokens=99), sample(2)]
    assert answers(samples, 3, None, 4) == []
    samples[2].prompt_tokens = 40
    (reason,) = answers(samples, 3, None, 4)
    assert "1 prompts have not 41 tokens, the first has 40" in reason.text
    assert len(run().samples) == 3


def test_what_is_said_of_a_run_names_its_workload_and_arguments() -> None:
    assert "workload" not in Rules().facts() and Rules(kind="mixed").facts()["workload"] == "mixed"
    plain = Setup().facts()
    more = Setup(router_args=["--bind=late"], one_args={"decode-0": ["--x"]}).facts()
    assert more == {**plain, "router_args": ["--bind=late"], "one_args": {"decode-0": ["--x"]}}


def test_arguments_for_one_engine() -> None:
    assert engine_args(["decode-1:--a=b:c", "prefill-0:--x", "decode-1:--y"]) == {
        "decode-1": ["--a=b:c", "--y"],
        "prefill-0": ["--x"],
    }
    for text in ("decode-1", ":--x", "decode-1:"):
        with pytest.raises(ConfigError, match="NAME:ARG"):
            engine_args([text])
    with pytest.raises(ConfigError, match="did you mean 'decode-0'"):
        DeploymentSpec(one_args={"decode-o": ["--x"]}).check()
    with pytest.raises(ConfigError, match="'--port=1' is set by kvferry"):
        DeploymentSpec(one_args={"decode-0": ["--port=1"]}).check()
