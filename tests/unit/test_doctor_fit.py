"""Targets, and whether two engines fit by what they say."""

from __future__ import annotations

import pytest
from doctor_parts import LAYOUT as BARE
from doctor_parts import PLANE
from msgspec.structs import replace

from kvferry.doctor.fit import judge_clock, judge_models, judge_one, judge_pair, shares
from kvferry.doctor.target import parse_target
from kvferry.errors import ConfigError
from kvferry.protocol.messages import Inspection

LAYOUT = replace(
    BARE,
    fingerprint={"model": "m#1", "dtype": "bfloat16", "kv_cache_dtype": "auto", "kv_packing": "plain"},
)


def ranks(tp=1, role="producer", heads=None, layout=LAYOUT, **fields):
    heads = max(1, layout.total_heads // tp) if heads is None else heads
    one = Inspection(
        engine_id=fields.pop("engine_id", role),
        life=1,
        rank=0,
        tp_size=tp,
        role=role,
        mode=fields.pop("mode", "push"),
        background=True,
        layout=replace(layout, heads=heads),
        backends=("UCX",),
        versions=fields.pop("versions", {"kvferry": "1"}),
        machine="m",
        wall_s=1.0,
    )
    assert not fields
    return {rank: replace(one, rank=rank) for rank in range(tp)}


def bad(findings):
    assert all(one.todo for one in findings if one.status != "ok")
    return {one.check: (one.status, one.said) for one in findings if one.status != "ok"}


def test_equal_engines_fit():
    assert bad(judge_pair(ranks(), ranks(role="consumer"))) == {}


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        ({"fingerprint": {**LAYOUT.fingerprint, "model": "x"}}, "model", "prefill has 'm#1', decode has 'x'"),
        ({"fingerprint": {**LAYOUT.fingerprint, "dtype": "float16"}}, "dtype", "dtype differs"),
        ({"fingerprint": {**LAYOUT.fingerprint, "kv_cache_dtype": "fp8"}}, "dtype", "kv_cache_dtype differs"),
        ({"fingerprint": {**LAYOUT.fingerprint, "kv_packing": "amx"}}, "kernels", "kv_packing differs"),
        ({"block_size": 24}, "block size", "prefill has 16, decode has 24"),
        ({"block_size": 32, "divisible": False}, "block size", "prefill has 16, decode has 32"),
        ({"planes": (PLANE,)}, "KV layout", "number of planes differs"),
        (
            {"planes": (PLANE, replace(PLANE, token_bytes=32))},
            "KV layout",
            "planes[1].token_bytes differs",
        ),
    ],
)
def test_each_difference_is_named_and_no_other(change, check, says):
    found = bad(judge_pair(ranks(), ranks(role="consumer", layout=replace(LAYOUT, **change))))
    assert list(found) == [check]
    assert found[check][0] == "FAIL" and says in found[check][1]


def test_all_differences_are_named_at_once():
    layout = replace(LAYOUT, fingerprint={"model": "x", "dtype": "y"}, block_size=7)
    found = bad(judge_pair(ranks(), ranks(role="consumer", layout=layout, mode="pull", versions={"kvferry": "2"})))
    assert found.keys() == {"mode", "versions", "model", "dtype", "kernels", "block size"}
    assert found["versions"] == ("warn", "prefill / decode: kvferry 1 / 2")


def test_tp_plans():
    p, d = ranks(tp=4), ranks(tp=2, role="consumer")
    assert bad(judge_pair(p, d)) == {}
    assert [(rank, share.p_rank) for rank, share in shares(p, d)] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    wrong = bad(judge_pair(ranks(), ranks(tp=3, role="consumer")))
    assert wrong["TP plan"][1] == "total_heads=4 cannot be placed on tp=3 ranks"
    liar = bad(judge_pair(ranks(), ranks(tp=2, role="consumer", heads=4)))
    assert "wrong TP size: consumer rank 0 holds 4 KV heads, at TP 2 it would be 2" in liar["TP plan"][1]


def test_one_engine_against_what_is_said_of_it():
    target = parse_target("http://h:8100,side_channel=s:5601,engine_id=producer,tp=1", "prefill")
    assert (target.url, target.host, target.port) == ("http://h:8100", "s", 5601)
    assert bad(judge_one(target, ranks())) == {}
    found = bad(judge_one(replace(target, tp=8, engine_id="other", role="decode"), ranks()))
    assert found.keys() == {"role", "TP size", "engine id"}
    assert found["TP size"] == ("FAIL", "wrong TP size: told tp=8, the engine has 1")


def test_targets():
    alone = parse_target("[::1]:5600,tp=2", "decode")
    assert (alone.url, alone.host, alone.port, alone.tp, alone.name) == ("", "::1", 5600, 2, "decode [::1]:5600")
    for text, says in (
        ("h", "expected HOST:PORT"),
        ("h:0", "port"),
        ("h:1,side_channel=h:2", "two side channels"),
        ("h:1,tpp=2", "unknown name 'tpp'"),
        ("http://h:1,tp=x", "tp: expected a number"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_target(text, "prefill")


def test_clocks_and_names():
    late = judge_clock("d", -2.0, 0.001)
    assert late.status == "ok" and "2000.0 ms behind" in late.said and "out of order" in late.said
    assert "out of order" not in judge_clock("d", 0.2, 0.001).said
    assert judge_models("w", None, ["a"]) == judge_models("w", ["a", "b"], ["b"]) == []
    (other,) = judge_models("w", ["a"], ["b"])
    assert other.status == "FAIL" and "--served-model-name" in other.todo
