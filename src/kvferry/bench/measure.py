"""One point: load, what it left, judgement, and the facts that go into its file."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.environment import environment
from kvferry.bench.judge import Reason, judge
from kvferry.bench.load import Job, Load, LoadRun
from kvferry.bench.mix import Kind
from kvferry.bench.points import OURS, Point
from kvferry.bench.stats import summary
from kvferry.bench.target import Target
from kvferry.bench.workload import Arrival, Prompts
from kvferry.launch.cancel import Cancel

FORMAT = 1


@dataclass(frozen=True)
class Rules:
    """How every point is measured."""

    num: int = 100
    arrival: Arrival = "poisson"
    seed: int = 0
    warm_ups: int = 2
    timeout_s: float = 300.0
    prompts: Prompts = "text"
    kind: Kind = "random"

    def facts(self) -> dict[str, Any]:
        facts = {"num": self.num, "arrival": self.arrival, "seed": self.seed, "warm_ups": self.warm_ups}
        mix = {} if self.kind == "random" else {"workload": self.kind}
        return {**facts, "prompts": self.prompts, **mix}


@dataclass(frozen=True)
class Measured:
    """`reasons`: why it is void. `facts`: what the point's file holds."""

    run: LoadRun
    reasons: Sequence[Reason]
    facts: dict[str, Any]


def seed_of(rules: Rules, point: Point) -> int:
    """The same in every mode, so that all get the same prompts at the same times; different for any other point."""
    text = f"{rules.seed}:{point.qps:g}:{point.input_len}:{point.output_len}:{point.iteration}"
    return zlib.crc32(text.encode())


def job_of(target: Target, rules: Rules, point: Point, log: Path) -> Job:
    return Job(
        url=target.url,
        model=target.model,
        words=target.words,
        tokenizer=target.tokenizer,
        input_len=point.input_len,
        output_len=point.output_len,
        qps=point.qps,
        num=rules.num,
        arrival=rules.arrival,
        prompts=rules.prompts,
        seed=seed_of(rules, point),
        warm_ups=rules.warm_ups,
        timeout_s=rules.timeout_s,
        log=log,
        kind=rules.kind,
    )


def measure(
    target: Target, load: Load, job: Job, point: Point, cancel: Cancel, progress: Callable[[str], None]
) -> Measured:
    """Raises `Stopped`."""
    before, modes = target.engines.now(), target.router_modes()
    begun = time.time()
    run = load.run(job, cancel, progress)
    lengths = [sample.input_len for sample in run.samples] + [job.input_len] * run.warm_ups
    nbytes = sum(map(target.kv.needed, lengths)) if target.kv and target.mode.split else 0
    told = target.engines.since(before, sum(lengths), nbytes)
    target.stories.update()
    account = judge(job, run, target.mode, target.kv, target.stories, told)
    reasons = [*account.reasons, *_wrong_mode(target, modes)]
    if died := target.died():
        reasons.insert(0, Reason("died", died))
    good = [sample for sample in run.samples if not sample.error]
    ours = {
        "format": FORMAT,
        "point": point.facts(),
        "ttft_ms": summary([sample.ttft_ms for sample in good if sample.tokens]),
        "tpot_ms": summary([sample.tpot_ms for sample in good if sample.tpot_ms is not None]),
        "itl_ms": summary([gap for sample in good for gap in sample.itl_ms]),
        "e2e_ms": summary([sample.e2e_ms for sample in good]),
        "lag_ms": summary([sample.lag_ms for sample in run.samples]),
        "lag_source": run.lag_source,
        "requests_per_s": len(good) / run.duration_s if run.duration_s else None,
        "transfer": account.transfer,
        "transfer_ids": [sample.transfer_id for sample in run.samples],
        "prompt_tokens_by_source": told.by_role,
        "engine_late_s": told.late_s,
        "warm_ups": run.warm_ups,
        "seed": job.seed,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        "generator": {"name": load.name, "version": load.version(), "command": run.command},
        "environment": environment(),
    }
    return Measured(run, reasons, {**(run.raw or like_vllm(job, run)), OURS: ours})


def _wrong_mode(target: Target, before: dict[str, float]) -> list[Reason]:
    """A router that sends requests another way than this run is called by."""
    if target.mode.connector not in ("kvferry", "none"):
        return []
    grown = {mode for mode, count in target.router_modes().items() if count > before.get(mode, 0.0)}
    others = grown - {target.mode.router_mode}
    said = f"the router served in mode {', '.join(sorted(others))}, not {target.mode.router_mode}"
    return [Reason("mode", said)] if others else []


def like_vllm(job: Job, run: LoadRun) -> dict[str, Any]:
    """A result under the names that `vllm bench serve` writes; seconds, but for the names that end in _ms."""
    good = [sample for sample in run.samples if not sample.error]
    prompt = [sample.prompt_tokens if sample.prompt_tokens is not None else sample.input_len for sample in run.samples]
    facts: dict[str, Any] = {
        "request_rate": job.qps,
        "burstiness": "inf" if job.arrival == "constant" else 1.0,
        "num_prompts": job.num,
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "total_input_tokens": sum(prompt),
        "total_output_tokens": sum(sample.tokens for sample in run.samples),
        "request_throughput": len(good) / run.duration_s if run.duration_s else 0.0,
        "input_lens": prompt,
        "output_lens": [sample.tokens for sample in run.samples],
        "ttfts": [sample.ttft_ms / 1e3 for sample in run.samples],
        "itls": [[gap / 1e3 for gap in sample.itl_ms] for sample in run.samples],
        "start_times": run.starts_s,
        "errors": [sample.error for sample in run.samples],
    }
    for name, values in (
        ("ttft", [sample.ttft_ms for sample in good]),
        ("tpot", [sample.tpot_ms for sample in good if sample.tpot_ms is not None]),
        ("itl", [gap for sample in good for gap in sample.itl_ms]),
        ("e2el", [sample.e2e_ms for sample in good]),
    ):
        told = summary(values)
        facts |= {f"mean_{name}_ms": told["mean"], f"median_{name}_ms": told["p50"]}
        facts |= {f"p{p}_{name}_ms": told[f"p{p}"] for p in (50, 90, 99)}
    return facts
