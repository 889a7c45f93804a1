"""Load from aiperf, for machines without vLLM: our prompts as token ids, each at its own time of a fixed schedule."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.bench import external, workload
from kvferry.bench.load import Job, LoadRun
from kvferry.bench.load_builtin import warm_up
from kvferry.bench.records import Sample
from kvferry.launch.cancel import Cancel
from kvferry.versions import package_version

START_S = 120.0
RECORDS = "profile_export.jsonl"


class AiperfLoad:
    name = "aiperf"
    overhead_s = 6.0
    texts = False
    tokenizer = True

    def version(self) -> str:
        return package_version("aiperf") or "unknown"

    def run(self, job: Job, cancel: Cancel, progress: Callable[[str], None]) -> LoadRun:
        due = workload.send_times(job.num, job.qps, job.arrival, job.seed)
        warm = warm_up(job, cancel)
        with external.scratch("kvferry-load-") as (folder, guard):
            schedule = folder / "schedule.jsonl"
            schedule.write_text("".join(json.dumps(line) + "\n" for line in _schedule(job, due)))
            argv = self.command(job, schedule, folder)
            limit = START_S + job.num / job.qps * 2 + job.timeout_s
            broken = external.run(argv, dict(os.environ), job.log, guard, cancel, progress, limit_s=limit)
            records = folder / RECORDS
            lines = read_records(records)
        if len(lines) < job.num and (broken or not lines):
            broken = f"{broken or 'the load generator ended'}, with {len(lines)} of {job.num} requests recorded"
            return LoadRun([], 0.0, [], warm, "", command=argv, broken=broken)
        return load_run(lines, due, job, warm, argv)

    def command(self, job: Job, schedule: Path, folder: Path) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name("aiperf")), "profile", "--model-names", job.model, "--url", job.url),
            *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(job.tokenizer)),
            *("--input-file", str(schedule), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
            *("--use-server-token-count", "--request-timeout-seconds", f"{job.timeout_s:g}"),
            *("--workers-max", "1", "--no-server-metrics", "--no-gpu-telemetry", "--ui-type", "none"),
            *("--export-level", "records", "--output-artifact-dir", str(folder)),
        ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Of each request; what was cut off where aiperf ended is none."""
    raw = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in raw if line]


def _schedule(job: Job, due: list[float]) -> list[dict[str, Any]]:
    """aiperf sends `payload` as it is, `timestamp` milliseconds after its start."""
    return [
        {
            "timestamp": at * 1e3,
            "payload": {
                "model": job.model,
                "prompt": workload.prompt(job.words, job.seed, job.input_len, index),
                "max_tokens": job.output_len,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        }
        for index, at in enumerate(due)
    ]


def load_run(lines: list[dict[str, Any]], due: list[float], job: Job, warm: int, argv: list[str]) -> LoadRun:
    """aiperf tells when it sent, not when its schedule began: lateness counts from the most punctual request."""
    lines = sorted(lines, key=lambda line: int(line["metadata"]["request_start_ns"]))
    starts = [int(line["metadata"]["request_start_ns"]) / 1e9 for line in lines]
    offsets = [start - at for start, at in zip(starts, due, strict=False)]
    base = min(offsets, default=0.0)
    samples = []
    for index, line in enumerate(lines):
        sample = Sample(index, job.input_len, sent_s=starts[index])
        if line.get("error"):
            sample.error = str(line["error"].get("message", line["error"]))[:300]
        else:
            told = {name: metric["value"] for name, metric in line["metrics"].items()}
            sample.ttft_ms = float(told.get("time_to_first_token", 0.0))
            sample.itl_ms = [float(gap) for gap in told.get("inter_chunk_latency", [])]
            sample.e2e_ms = sample.ttft_ms + sum(sample.itl_ms)
            sample.tokens = int(told.get("output_sequence_length", 0))
            sample.first_tokens = 1 if sample.tokens else 0
            sample.prompt_tokens = int(told["usage_prompt_tokens"]) if "usage_prompt_tokens" in told else None
        if len(lines) == len(due):
            sample.lag_ms = (offsets[index] - base) * 1e3
        samples.append(sample)
    first = min(starts, default=0.0)
    ends = [sample.sent_s + sample.e2e_ms / 1e3 for sample in samples]
    return LoadRun(
        samples=samples,
        duration_s=max(ends, default=first) - first,
        starts_s=[start - first for start in starts],
        warm_ups=warm,
        lag_source="send times against the schedule, from the most punctual request" if len(lines) == len(due) else "",
        command=argv,
        request_ids=[str(line["metadata"].get("x_request_id", "")) for line in lines],
    )
