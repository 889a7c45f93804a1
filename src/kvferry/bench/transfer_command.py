"""`kvferry bench transfer`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import get_args

import msgspec
import psutil

from kvferry.bench.arguments import above_zero
from kvferry.bench.points import check_writable
from kvferry.bench.report import write_json
from kvferry.bench.transfer_bench import PREFILL_OF_PUSH, Job, measure
from kvferry.bench.transfer_report import facts_of, text
from kvferry.bench.transfer_shape import PRESETS, Order, pool_blocks, shape_named
from kvferry.config import Staging
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Stopped
from kvferry.launch.commands import say
from kvferry.protocol.messages import Mode, Verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--shape",
        default="qwen3-32b-tp8",
        metavar="S",
        help=f"KV of one rank: {', '.join(PRESETS)}, or LxHxDxBLOCK: layers, KV heads, head size, tokens per block "
        "(default: qwen3-32b-tp8)",
    )
    add(
        "--layout",
        choices=get_args(Order),
        default="LBHNC",
        help="of the KV in memory: the blocks of a layer adjoin, or the layers of a block (default: LBHNC)",
    )
    add("--tokens", type=int, default=16_384, metavar="N", help="prompt tokens (default: 16384)")
    add(
        "--fragmentation",
        type=float,
        default=0.0,
        metavar="F",
        help="chance that a block's successor lies elsewhere, on each side by itself; 0 to 1 (default: 0)",
    )
    add("--mode", choices=get_args(Mode), default="push")
    add("--chunks", type=int, default=8, metavar="C", help="stream: steps in which prefill makes the KV (default: 8)")
    add("--layer-groups", type=int, default=1, metavar="G", help="stream: parts in which a step's layers are ready")
    add(
        "--prefill-ms",
        type=above_zero,
        metavar="MS",
        help=f"stream: how long prefill takes (default: {PREFILL_OF_PUSH:g} times what push takes)",
    )
    add(
        "--staging",
        choices=get_args(Staging),
        default="auto",
        help="whether KV in small pieces goes gathered; the connector's setting of that name (default: auto)",
    )
    add(
        "--verify",
        choices=get_args(Verify),
        default="sample",
        help="what is compared of the KV on both sides before it counts as landed (default: sample)",
    )
    add("--runs", type=int, default=7, metavar="R", help="of each kind, after one that warms up (default: 7)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="F", help="write everything, each run too")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if a transfer failed or brought wrong bytes; 130 if stopped."""
    job = job_of(args)
    check_writable("--json", args.json)
    load = os.getloadavg()[0]
    try:
        with stoppable():
            samples = measure(job, say)
    except Stopped:
        say("stopped")
        return 130
    facts = facts_of(job, samples, load)
    print(text(facts), flush=True)
    if args.json:
        write_json(args.json, facts)
    return 0


def job_of(args: argparse.Namespace) -> Job:
    """Raises `ConfigError`."""
    shape = shape_named(args.shape)
    for option, value, least in (("--tokens", args.tokens, 1), ("--runs", args.runs, 1), ("--seed", args.seed, 0)):
        if value < least:
            raise ConfigError(f"{option}: {value}", hint=f"expected {least} or more")
    if not 0 <= args.fragmentation <= 1:
        raise ConfigError(f"--fragmentation: {args.fragmentation:g}", hint="expected a chance, 0 to 1")
    blocks = shape.blocks(args.tokens)
    if not 1 <= args.chunks <= blocks and args.mode == "stream":
        raise ConfigError(f"--chunks: {args.chunks}", hint=f"expected 1 to {blocks}, the blocks")
    if not 1 <= args.layer_groups <= shape.layers:
        raise ConfigError(f"--layer-groups: {args.layer_groups}", hint=f"expected 1 to {shape.layers}, the layers")
    for option, given in (("--layer-groups", args.layer_groups > 1), ("--prefill-ms", args.prefill_ms is not None)):
        if given and args.mode != "stream":
            raise ConfigError(f"{option} with --mode {args.mode}", hint="only stream sends while prefill runs")
    needed, there = 2 * pool_blocks(blocks) * shape.block_bytes, psutil.virtual_memory().available
    if needed > there:
        sizes = f"2 x {needed / 2**31:.1f} GiB, {there / 2**30:.1f} GiB are free"
        raise ConfigError(f"--tokens: {args.tokens} of this shape need {sizes}", hint="ask for fewer tokens")
    return Job(
        shape=shape,
        layout=args.layout,
        tokens=args.tokens,
        fragmentation=args.fragmentation,
        mode=msgspec.convert(args.mode, Mode),
        chunks=args.chunks,
        layer_groups=args.layer_groups,
        staging=msgspec.convert(args.staging, Staging),
        prefill_ms=args.prefill_ms,
        verify=msgspec.convert(args.verify, Verify),
        runs=args.runs,
        seed=args.seed,
    )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread, wherever it waits."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
