"""`kvferry bench render`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from kvferry.bench.arguments import lengths
from kvferry.bench.environment import environment
from kvferry.bench.points import check_writable
from kvferry.bench.render_bench import ROOM, Job, Vocabulary, facts_of, measure
from kvferry.bench.render_hosts import HostsJob, measure_hosts
from kvferry.bench.render_hosts import text as hosts_rows
from kvferry.bench.render_script import CALLS, PARSERS, THINKING, Parser
from kvferry.bench.render_servers import peer_module
from kvferry.bench.report import aligned, write_json
from kvferry.bench.transfer_command import stoppable
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.cancel import Stopped
from kvferry.launch.commands import say
from kvferry.launch.model import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", metavar="M", help="smollm2, or a model's folder; no weights are loaded")
    add("--output-tokens", type=lengths, default=[1000, 4000, 16000], metavar="N,N", help="(default: 1000,4000,16000)")
    add("--parser", default="tool", metavar="P", help=f"of the output: {', '.join(PARSERS)} (default: %(default)s)")
    add("--tool-call-parser", default="qwen3_xml", metavar="NAME", help=f"vLLM's: {', '.join(CALLS)} (%(default)s)")
    add("--reasoning-parser", default="qwen3", metavar="NAME", help=f"vLLM's: {', '.join(THINKING)} (%(default)s)")
    add("--prompt-tokens", type=int, default=9000, metavar="N", help="of the rendered chats (default: 9000)")
    add("--renders", type=int, default=40, metavar="N", help="chats per round and server; 0: none (default: 40)")
    add("--at-once", type=int, default=4, metavar="N", help="chats in flight (default: 4)")
    add("--rounds", type=int, default=3, metavar="R", help="of both servers, in alternating order (default: 3)")
    add(
        "--whole",
        type=int,
        default=1000,
        metavar="N",
        help="longest output for which the stateless endpoint is called for every token if a parser makes it replay; "
        "longer ones are sampled (default: 1000)",
    )
    add("--samples", type=int, default=24, metavar="N", help="calls of a sampled stream (default: 24)")
    add("--engine-cpu", action="store_true", help="instead: CPU time of a pair of vLLM engines without and with a tier")
    add("--requests", type=int, default=12, metavar="N", help="of --engine-cpu, without and with (default: 12)")
    add("--engine-prompt-tokens", type=int, default=3000, metavar="N", help="of --engine-cpu's chats (default: 3000)")
    add("--engine-output-tokens", type=int, default=64, metavar="N", help="of --engine-cpu's chats (default: 64)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="F", help="write everything")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if the two servers did not say the same; 130 if stopped."""
    check_writable("--json", args.json)
    if args.engine_cpu:
        return _hosts(args)
    job = job_of(args)
    peer_module()
    about = environment()
    try:
        with stoppable():
            facts = facts_of(job, measure(job, say), about)
    except Stopped:
        say("stopped")
        return 130
    print(text(facts), flush=True)
    if args.json:
        write_json(args.json, facts)
    same = all(point["same_output"] for point in facts["points"]) and facts.get("renders", {}).get("same_ids", True)
    return 0 if same else 1


def _hosts(args: argparse.Namespace) -> int:
    for option, value in (
        ("--requests", args.requests),
        ("--engine-prompt-tokens", args.engine_prompt_tokens),
        ("--engine-output-tokens", args.engine_output_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{option}: {value}", hint="expected 1 or more")
    tokenizer = Vocabulary(prepare(args.model, report=say))
    job = HostsJob(
        model=args.model,
        prompt_tokens=args.engine_prompt_tokens,
        output_tokens=args.engine_output_tokens,
        requests=args.requests,
        max_model_len=args.engine_prompt_tokens + args.engine_output_tokens + ROOM,
        seed=args.seed,
    )
    try:
        with stoppable(), tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
            facts = {"hosts": measure_hosts(job, tokenizer, Path(folder), say), "environment": environment()}
    except Stopped:
        say("stopped")
        return 130
    print(aligned(hosts_rows(facts["hosts"])), flush=True)
    if args.json:
        write_json(args.json, facts)
    return 0


def job_of(args: argparse.Namespace) -> Job:
    """Raises `ConfigError`."""
    if args.parser not in PARSERS:
        raise unknown_name("--parser", args.parser, PARSERS)
    if args.tool_call_parser not in CALLS:
        raise unknown_name("--tool-call-parser", args.tool_call_parser, CALLS)
    if args.reasoning_parser not in THINKING:
        raise unknown_name("--reasoning-parser", args.reasoning_parser, THINKING)
    for option, value, least in (
        ("--prompt-tokens", args.prompt_tokens, 16),
        ("--renders", args.renders, 0),
        ("--at-once", args.at_once, 1),
        ("--rounds", args.rounds, 1),
        ("--whole", args.whole, 0),
        ("--samples", args.samples, 2),
        ("--output-tokens", min(args.output_tokens), 100),
    ):
        if value < least:
            raise ConfigError(f"{option}: {value}", hint=f"expected {least} or more")
    return Job(
        model=prepare(args.model, report=say),
        output_tokens=tuple(args.output_tokens),
        parser=msgspec.convert(args.parser, Parser),
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        prompt_tokens=args.prompt_tokens,
        renders=args.renders,
        at_once=args.at_once,
        rounds=args.rounds,
        whole=args.whole,
        samples=args.samples,
        seed=args.seed,
    )


def text(facts: dict[str, Any]) -> str:
    parts = []
    rows: list[tuple[str, ...]]
    if "renders" in facts:
        rendered = facts["renders"]
        rows = [
            (
                f"{rendered['prompt_tokens']}-token chat",
                "CPU ms a render",
                "renders/core s",
                "renders/s",
                "alone p50 ms",
            )
        ]
        for name, one in (("session opened and left", rendered), ("vLLM's render server", rendered["peer"])):
            cpu, alone = one["cpu_ms"], one["alone_ms"]
            spread = f"{one['cpu_ms_per_render']:.1f} ({cpu['min']:.1f} to {cpu['max']:.1f})"
            rates = (f"{one['renders_per_core_s']:.1f}", f"{one['renders_per_s']:.1f}")
            rows.append((name, spread, *rates, f"{alone['p50']:.1f}"))
        parts.append(aligned(rows) + ("" if rendered["same_ids"] else "\nTHE IDS DIFFER"))
    rows = [("output tokens", "server", "CPU us/token", "bytes/token", "calls", "same output")]
    for point in facts["points"]:
        for name, one in (("session", point), ("stateless", point["peer"])):
            cpu = one["cpu_us"]
            sample = one["sampled"]
            calls = "all" if sample is None else f"{sample['calls']} sampled"
            spread = f"{one['cpu_us_per_token']:,.0f} ({cpu['min']:,.0f} to {cpu['max']:,.0f})"
            same = "yes" if point["same_output"] else "NO"
            rows.append((f"{point['output_tokens']:,}", name, spread, f"{one['bytes_per_token']:,.0f}", calls, same))
    parts.append(aligned(rows))
    ratio = facts["ratio"]
    parts.append(
        f"per token at {ratio['to']:,} to {ratio['from']:,}: session CPU x{ratio['cpu_us_per_token']:.2f}, bytes "
        f"x{ratio['bytes_per_token']:.2f}; stateless CPU x{ratio['peer_cpu_us_per_token']:.2f}, bytes "
        f"x{ratio['peer_bytes_per_token']:.2f}"
    )
    return "\n\n".join(parts)
