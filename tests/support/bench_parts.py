"""A run of a load generator that is good in every respect, to be made wrong in one; and the file of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.bench.kv import KvFacts
from kvferry.bench.load import Job, LoadRun
from kvferry.bench.points import OURS, Point
from kvferry.bench.records import Sample
from kvferry.bench.witness import Stories, Told, Transfer
from kvferry.bench.workload import ModelFacts

KV = KvFacts(token_bytes=100, block_size=16)
EXPECTED = 3 * 16 * 100  # 40 of 41 prompt tokens, in whole blocks


def job(**other: Any) -> Job:
    facts: dict[str, Any] = {
        "url": "http://x",
        "model": "m",
        "words": ModelFacts(np.arange(9), 1),
        "tokenizer": None,
        "input_len": 41,
        "output_len": 4,
        "qps": 10.0,
        "num": 3,
        "arrival": "poisson",
        "prompts": "text",
        "seed": 0,
        "warm_ups": 2,
        "timeout_s": 1.0,
        "log": Path("log"),
    }
    return Job(**{**facts, **other})


def sample(index: int, **other: Any) -> Sample:
    made = Sample(index, 41, f"t{index}", ttft_ms=100.0, e2e_ms=130.0, itl_ms=[10.0] * 3, first_tokens=1, tokens=4)
    made.lag_ms, made.prompt_tokens = 1.0, 41
    for name, value in other.items():
        setattr(made, name, value)
    return made


def run(**other: Any) -> LoadRun:
    facts: dict[str, Any] = {
        "samples": [sample(index) for index in range(3)],
        "duration_s": 10.0,
        "starts_s": [0.0, 0.1, 0.2],
        "warm_ups": 2,
        "lag_source": "a clock",
    }
    return LoadRun(**{**facts, **other})


def stories(**moved: int) -> Stories:
    made = Stories([])
    for index in range(3):
        nbytes = moved.get(f"t{index}", EXPECTED)
        made.transfers[f"t{index}"] = Transfer(nbytes, 4, 1, computed=10.0, landed=10.0 + 0.001 * (index + 1))
    return made


def told(**other: Any) -> Told:
    counted = {"local_compute": 5.0, "local_cache_hit": 0.0, "external_kv_transfer": 200.0}
    facts: dict[str, Any] = {"by_role": {"decode": counted}, "nixl_bytes": None, "late_s": {}}
    return Told(**{**facts, **other})


def tiny_model(folder: Path) -> Path:
    """Enough of a model's files for prompts of token ids."""
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 5000}))
    return folder


def result_facts(point: Point, ttft_ms: float, gap_ms: float, num: int = 5, **settings: Any) -> dict[str, Any]:
    """What the file of a point holds."""
    stats = {"p50": 2.0, "p90": 3.0, "p99": 4.0}
    return {
        "ttfts": [(ttft_ms + i) / 1e3 for i in range(num)],
        "itls": [[gap_ms / 1e3] * 3] * num,
        "output_lens": [4] * num,
        "request_throughput": 2.0,
        "duration": num / 2.0,
        OURS: {
            "point": point.facts(),
            "transfer": {"by": "stories", "moved_bytes": 2**20, "expected_bytes": 2**20, "exposed_ms": stats},
            "transfer_ids": ["abc"],
            "generator": {"name": "vllm", "version": "1", "command": ["x", "<&>"]},
            "environment": {"cores": 2, "cpu_model": "CPU <1>", "memory_gib": 3.0},
            "settings": {
                **{"engine": "sim", "profile": "p", "model": "m", "prefill": 1, "decode": 1, "seed": 11, "num": num},
                **{"arrival": "poisson", "warm_ups": 2, "engine_args": ["--a"], "load": "vllm", **settings},
            },
        },
    }
