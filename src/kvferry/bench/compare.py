"""Modes side by side on one machine, in rounds: one deployment at a time, started, measured, stopped.

Modes need different engines, and idle engines are not quiet (NIXL's progress threads spin), so nothing but the mode
under test runs. Every round visits every mode once, the next one in reverse, so that a drift of the machine meets all
alike. The prompts are the same in every mode.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from kvferry.bench import workload
from kvferry.bench.client import LoadClient, until_stopped
from kvferry.bench.kv import KvFacts, of_model, of_profile
from kvferry.bench.records import Batch, Sample, Variant
from kvferry.bench.target import PUBLISHED_ARGS, Report, indented
from kvferry.bench.watch import Watch
from kvferry.errors import KVFerryError
from kvferry.launch import model as models
from kvferry.launch.cancel import Cancel
from kvferry.launch.deployment import Deployment
from kvferry.launch.process import ProcessDied
from kvferry.launch.spec import DEFAULT_MODEL, DEFAULT_PROFILE, DeploymentSpec

FIRST = 1_000_000
"""Prompts of first requests are numbered from here, so that none is a measured one."""


@dataclass(frozen=True)
class Settings:
    modes: Sequence[str]
    as_shipped: Sequence[str] = ()
    engine: str = "vllm"
    profile: str = ""
    model: str = DEFAULT_MODEL
    dtype: str = "bfloat16"
    input_lens: Sequence[int] = (500,)
    output_tokens: int = 32
    num: int = 10
    as_shipped_num: int = 4
    rounds: int = 2
    qps: float | None = None
    arrival: workload.Arrival = "poisson"
    max_in_flight: int = 64
    seed: int = 0
    warm_up: bool = True
    timeout_s: float = 300.0
    vllm_args: Sequence[str] = ()

    def engine_args(self) -> list[str]:
        return [*PUBLISHED_ARGS, *self.vllm_args]


@dataclass(frozen=True)
class Slice:
    """One start of one deployment: requests `indexes` of each prompt length, after one of `first_len` on its own."""

    variant: Variant
    round: int
    indexes: range
    first_len: int


@dataclass
class Run:
    """`kv_bytes`: of one token. `slices`: what the machine did meanwhile. `failures`: of as-shipped modes."""

    kv_bytes: int
    batches: list[Batch] = field(default_factory=list)
    slices: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


def rounds_plan(settings: Settings) -> list[Slice]:
    """ABC, CBA, BCA, ACB, ...: each pair of rounds starts one mode later, and its second round is its first reversed.
    As-shipped modes come last, once each.
    """
    modes = list(settings.modes)
    plan = []
    for number in range(settings.rounds):
        shift = number // 2 % max(1, len(modes))
        order = modes[shift:] + modes[:shift]
        begin, end = (settings.num * n // settings.rounds for n in (number, number + 1))
        first_len = settings.input_lens[number % len(settings.input_lens)]
        for mode in order if number % 2 == 0 else reversed(order):
            plan.append(Slice(Variant(mode, engine=settings.engine), number, range(begin, end), first_len))
    for mode in settings.as_shipped:
        plan.append(Slice(Variant(mode, False), 0, range(settings.as_shipped_num), settings.input_lens[0]))
    return plan


def compare(settings: Settings, folder: Path, report: Report, cancel: Cancel) -> Run:
    """Raises `VoidRun` as soon as one slice is not what it should be. Logs and stories stay in `folder`.

    As-shipped modes are for information and may not work at all on few cores (their handshake gives up after 5 s):
    each gets a second start, and what went wrong is part of the result.
    """
    plan = rounds_plan(settings)
    kv, words = _model_facts(settings, report, cancel)
    run = Run(kv.token_bytes)
    begun = time.monotonic()
    for number, part in enumerate(plan):
        spent = time.monotonic() - begun
        left = f", about {spent / number * (len(plan) - number) / 60:.0f} min left" if number else ""
        report(f"[{number + 1}/{len(plan)}] {part.variant.label}, round {part.round + 1}{left}")
        state = folder / f"{number + 1:02d}-{part.variant.label.replace(' ', '-')}"
        if part.variant.tuned:
            _measure(settings, part, kv, words, state, run, report, cancel)
            continue
        for attempt in (1, 2):
            try:
                _measure(settings, part, kv, words, state.with_name(f"{state.name}-{attempt}"), run, report, cancel)
                break
            except KVFerryError as error:
                report(f"  failed: {error.message}")
                run.failures.append({"mode": part.variant.mode, "attempt": attempt, "reason": error.message})
    return run


def _model_facts(settings: Settings, report: Report, cancel: Cancel) -> tuple[KvFacts, workload.ModelFacts]:
    if settings.engine == "sim":
        return of_profile(settings.profile, settings.vllm_args)
    path = models.prepare(settings.model, report=report, cancel=cancel)
    return of_model(path, settings.dtype, settings.vllm_args, None)


def _measure(
    settings: Settings,
    part: Slice,
    kv: KvFacts,
    words: workload.ModelFacts,
    state: Path,
    run: Run,
    report: Report,
    cancel: Cancel,
) -> None:
    load, begun, before = os.getloadavg()[0], time.monotonic(), psutil.cpu_times()
    spec = DeploymentSpec(
        mode=part.variant.mode,
        engine=settings.engine,
        profile=settings.profile or DEFAULT_PROFILE,
        model=settings.model if settings.engine == "vllm" else "",
        dtype=settings.dtype,
        vllm_args=settings.engine_args(),
        tuned=part.variant.tuned,
        # As shipped, a warm-up would hide what users meet, or end the run: its requests have less time than ours.
        warm_up=settings.warm_up and part.variant.tuned,
        state_dir=state,
    )
    batches: list[Batch] = []
    deployment = Deployment(spec, report=indented(report), cancel=cancel)
    try:
        with deployment:
            ready_s = time.monotonic() - begun
            watch = Watch(deployment, part.variant.label, kv)

            def ask(indexes: Sequence[int], length: int, qps: float | None) -> tuple[list[Sample], int | None]:
                prompts = [(i, workload.prompt(words, settings.seed, length, i)) for i in indexes]
                drive = partial(_ask, settings, deployment, prompts, qps, report, cancel)
                return watch.asked(drive, len(prompts), length, settings.output_tokens)

            for length in sorted(settings.input_lens, key=lambda length: length != part.first_len):
                batch = Batch(part.variant, length, part.round, [])
                if length == part.first_len:
                    (batch.first,), _ = ask([FIRST + part.round], length, None)
                batch.samples, batch.moved_bytes = ask(part.indexes, length, settings.qps)
                batches.append(batch)
            watch.check_engines()
    except ProcessDied as error:
        for line in error.tail:
            report(f"  {line}")
        raise
    after = psutil.cpu_times()
    for batch in batches:
        watch.add_hooks([*batch.samples, *([batch.first] if batch.first else [])])
    run.batches += batches
    run.slices.append(
        {
            "mode": part.variant.mode,
            "tuned": part.variant.tuned,
            "round": part.round,
            "ready_s": round(ready_s, 1),
            "total_s": round(time.monotonic() - begun, 1),
            "loadavg_1m_before": round(load, 2),
            "steal_s": round(getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0), 2),
        }
    )


def _ask(
    settings: Settings,
    deployment: Deployment,
    prompts: list[tuple[int, list[int]]],
    qps: float | None,
    report: Report,
    cancel: Cancel,
) -> list[Sample]:
    def done(sample: Sample) -> None:
        what = sample.error or f"first token after {sample.ttft_ms:.0f} ms, whole after {sample.e2e_ms:.0f} ms"
        report(f"  {sample.input_len} tokens, request {sample.index}: {what}")

    async def drive() -> list[Sample]:
        async with LoadClient(
            deployment.router_url,
            deployment.model_name(),
            settings.output_tokens,
            timeout_s=settings.timeout_s,
            max_in_flight=settings.max_in_flight,
        ) as client:
            if qps is None:
                return await client.one_by_one(prompts, done)
            due = workload.send_times(len(prompts), qps, settings.arrival, settings.seed)
            return await client.at_times(prompts, due, done)

    return until_stopped(drive(), cancel)
