"""Each way in which a run can be void, one at a time, on a run that is good but for it."""

from __future__ import annotations

from typing import Any

import pytest
from bench_parts import EXPECTED, KV, job, run, sample, stories, told

from kvferry.bench.judge import judge
from kvferry.bench.kv import KvFacts, of_profile
from kvferry.bench.records import Sample
from kvferry.bench.witness import Stories
from kvferry.launch.spec import mode_named


def kinds(mode: str = "push", **other: Any) -> list[str]:
    made = other.get("run", run())
    account = judge(
        other.get("job", job()),
        made,
        mode_named(mode),
        other.get("kv", KV),
        other.get("stories", stories()),
        other.get("told", told()),
    )
    return [reason.kind for reason in account.reasons]


@pytest.mark.parametrize("mode", ["push", "pull", "pull-inline", "colocated"])
def test_a_good_run(mode: str) -> None:
    assert kinds(mode) == []


def test_the_account_of_a_good_run() -> None:
    account = judge(job(), run(), mode_named("push"), KV, stories(), told())
    assert account.transfer["moved_bytes"] == account.transfer["expected_bytes"] == 3 * EXPECTED
    assert account.transfer["exposed_ms"]["p50"] == pytest.approx(2.0, abs=1e-3)
    assert account.transfer["descriptors"]["mean"] == 4


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        ([sample(0), sample(1), sample(2, error="500: no")], "failed"),
        ([sample(0), sample(1), sample(2, tokens=0, itl_ms=[])], "answers"),
        ([sample(0), sample(1), sample(2, tokens=3)], "answers"),
        ([sample(0), sample(1), sample(2, prompt_tokens=42)], "answers"),
        ([sample(0), sample(1)], "answers"),
    ],
)
def test_answers(samples: list[Sample], kind: str) -> None:
    assert kind in kinds("colocated", run=run(samples=samples))


def test_a_failed_request_is_named_first() -> None:
    failed = sample(1, error="500: no", tokens=0)
    account = judge(job(), run(samples=[sample(0), failed]), mode_named("push"), KV, stories(), told())
    assert account.reasons[0].text == "1 of 2 requests failed, the first: 500: no, in request 1 (transfer t1)"


def test_a_prompt_of_another_length_says_so() -> None:
    account = judge(
        job(),
        run(samples=[sample(0), sample(1), sample(2, prompt_tokens=39)]),
        mode_named("colocated"),
        KV,
        stories(),
        told(),
    )
    assert "1 prompts have not 41 tokens, the first has 39" in account.reasons[0].text


def test_warm_up() -> None:
    assert "warm-up" in kinds(job=job(warm_ups=0))
    assert "warm-up" in kinds(run=run(warm_ups=1))


@pytest.mark.parametrize(("lag_ms", "void"), [(1.99, False), (2.01, True)])
def test_two_percent_of_the_mean_interval_is_late(lag_ms: float, void: bool) -> None:
    samples = [sample(index, lag_ms=lag_ms) for index in range(3)]
    assert kinds(run=run(samples=samples)) == (["late"] if void else [])


def test_one_late_request_is_not_a_late_generator() -> None:
    assert kinds(run=run(samples=[sample(0), sample(1), sample(2, lag_ms=50.0)])) == []


def test_unknown_lateness_is_void() -> None:
    assert kinds(run=run(lag_source="")) == ["late"]


@pytest.mark.parametrize(("late_s", "void"), [(0.19, False), (0.21, True)])
def test_an_engine_that_overran_its_model(late_s: float, void: bool) -> None:
    assert kinds(told=told(late_s={"decode http://d": late_s})) == (["overrun"] if void else [])


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_a_prefix_cache(role: str) -> None:
    assert "cache" in kinds(told=told(by_role={role: {"local_cache_hit": 16.0}}))


@pytest.mark.parametrize("moved", [EXPECTED - 1600, EXPECTED + 1600, 0])
def test_moved_bytes_must_be_those_of_the_prompt(moved: int) -> None:
    assert kinds(stories=stories(t1=moved)) == ["transfer"]


def test_many_wrong_transfers_are_one_reason() -> None:
    account = judge(job(), run(), mode_named("push"), KV, stories(t0=0, t1=0, t2=7), told())
    assert len(account.reasons) == 1
    assert "(and 2 more like it)" in account.reasons[0].text


def test_without_a_block_size_enough_is_enough() -> None:
    kv = KvFacts(100, None)
    assert kinds(kv=kv, stories=stories(t0=4000)) == []
    assert kinds(kv=kv, stories=stories(t0=3999)) == ["transfer"]


def test_a_request_without_a_story() -> None:
    assert kinds(run=run(samples=[sample(0), sample(1), sample(2, transfer_id="other")])) == ["transfer"]


def test_request_ids_lead_to_stories() -> None:
    made = stories()
    made.requests = {f"r{index}": f"t{index}" for index in range(3)}
    samples = [sample(index, transfer_id="") for index in range(3)]
    assert kinds(run=run(samples=samples, request_ids=["r0", "r1", "r2"]), stories=made) == []
    assert [one.transfer_id for one in samples] == ["t0", "t1", "t2"]


def test_decode_that_computed_prompts_itself() -> None:
    assert kinds(told=told(by_role={"decode": {"local_compute": 6.0, "external_kv_transfer": 200.0}})) == ["transfer"]


def test_counters_where_there_are_no_stories() -> None:
    none = Stories([])
    assert kinds(stories=none) == []
    assert kinds(stories=none, told=told(by_role={"decode": {"external_kv_transfer": 199.0}})) == ["transfer"]
    assert kinds(stories=none, told=told(by_role={})) == ["transfer"]


@pytest.mark.parametrize(("nbytes", "void"), [(5 * 4000, False), (5 * 4000 - 1, True)])
def test_vllms_own_connectors_are_judged_by_their_bytes(nbytes: float, void: bool) -> None:
    seen = told(by_role={}, nixl_bytes=nbytes)
    made = run()
    assert kinds("upstream-push", run=made, told=seen) == (["transfer"] if void else [])
    assert [one.moved_bytes for one in made.samples] == [None] * 3, "nothing tells it of each"


def test_a_broken_generator_is_the_only_reason() -> None:
    assert kinds(run=run(samples=[], broken="it ended with exit code 1")) == ["broken"]


def test_kv_of_a_profile_is_scaled() -> None:
    kv, words = of_profile("llama-8b-l40s", [])
    assert (kv.token_bytes, kv.block_size) == (128 * 1024, 16)
    assert len(words.token_ids) == 128256
    assert of_profile("llama-8b-l40s", ["--byte-scale=64"])[0].token_bytes == 2048
    assert of_profile("llama-8b-l40s", ["--block-size", "64", "-tp", "16"])[0] == KvFacts(2 * 128 * 1024, 64)
