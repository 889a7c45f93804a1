"""`kvferry bench`: each kind of measurement is a module of its own, with `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    help: str
    module: str
    example: str


KINDS = {
    "compare": Kind(
        "latency of modes side by side, one deployment at a time",
        "kvferry.bench.compare_command",
        "kvferry bench compare --modes push,upstream-push,pull,upstream-pull,colocated --input-lens 500 --num 10 "
        "--json out.json",
    ),
    "sweep": Kind(
        "the published sweep: modes x rates x lengths, one file per point",
        "kvferry.bench.sweep_command",
        "kvferry bench sweep --engine sim --profile qwen3-32b-h200-tp8 --modes pull,push --qps 1,2,4,8 "
        "--input-lens 1000,4000,16000 --output-lens 128 --num 100 --results results",
    ),
    "goodput": Kind(
        "the highest rate at which requests hold their TTFT and ITL objectives",
        "kvferry.bench.goodput_command",
        "kvferry bench goodput --engine sim --profile llama-8b-l40s --ttft 2000 --itl 60 --modes colocated,push "
        "--input-len 2000 --output-len 128",
    ),
    "transfer": Kind(
        "one rank's transfer by the connector's core, without engines: time per part, beside floor and naive",
        "kvferry.bench.transfer_command",
        "kvferry bench transfer --shape qwen3-32b-tp8 --tokens 16384 --fragmentation 1 --mode push --json out.json",
    ),
    "router": Kind(
        "what a router adds to TTFT and how much it relays, on one core, beside vLLM's Rust router",
        "kvferry.bench.router_command",
        "kvferry bench router --qps 200,400 --peer-command vllm-router --json out.json",
    ),
    "render": Kind(
        "the render tier beside vLLM's render server: long prompts to ids, long streams of ids to what clients read",
        "kvferry.bench.render_command",
        "kvferry bench render --output-tokens 1000,4000,16000 --parser tool --json render.json",
    ),
    "soak": Kind(
        "engines under load while they are killed, stopped and cut off at random: every answer right, nothing left",
        "kvferry.bench.soak_command",
        "kvferry bench soak --minutes 20 --seed 7 --json soak.json",
    ),
    "plot": Kind(
        "figures of a sweep, or the timeline of one transfer",
        "kvferry.bench.plot_command",
        "kvferry bench plot --results results --metric ttft --out ttft.png",
    ),
    "report": Kind(
        "one HTML page of a sweep, with a verdict",
        "kvferry.bench.report_command",
        "kvferry bench report --results results --json points.json",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        command = kinds.add_parser(
            name,
            help=kind.help,
            description=kind.help[0].upper() + kind.help[1:] + ".",
            epilog=f"example: {kind.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        importlib.import_module(kind.module).add_arguments(command)


def run(args: argparse.Namespace) -> int:
    code: int = importlib.import_module(KINDS[args.kind].module).run(args)
    return code
