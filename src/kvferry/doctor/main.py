"""`kvferry doctor`: is the KV path between these engines what you think it is? Ask before traffic does."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from kvferry.auth import KEY_HELP, load_key
from kvferry.doctor import report
from kvferry.doctor.examine import Order, examine
from kvferry.doctor.path import TRANSPORTS
from kvferry.doctor.target import parse_target
from kvferry.errors import ConfigError

DEFAULT_PROMPT_TOKENS = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    spec = (
        "http://HOST:PORT[,side_channel=HOST:PORT][,engine_id=ID][,tp=N] as for the router, or HOST:PORT of the side "
    )
    parser.add_argument("--prefill", action="append", default=[], metavar="ENGINE", help=f"{spec}channel; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="ENGINE", help="likewise; repeatable")
    parser.add_argument(
        "--prompt-tokens",
        "--model-len",
        type=int,
        default=DEFAULT_PROMPT_TOKENS,
        metavar="N",
        help="predict the transfer of a prompt of N tokens (default: %(default)s)",
    )
    parser.add_argument("--ttft", type=float, metavar="MS", help="your objective for the time to first token")
    parser.add_argument(
        "--expect-transport",
        choices=TRANSPORTS,
        default="",
        metavar="NAME",
        help=f"warn unless both directions take this one: {', '.join(TRANSPORTS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same facts there")
    parser.add_argument("--auth-key-file", default="", metavar="FILE", help=KEY_HELP)
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY", ""),
        metavar="KEY",
        help="the key of the engines' HTTP side (default: $VLLM_API_KEY)",
    )


def order_of(args: argparse.Namespace) -> Order:
    """Raises `ConfigError`."""
    if not args.prefill or not args.decode:
        missing = "--prefill" if not args.prefill else "--decode"
        raise ConfigError(f"{missing}: at least one engine is needed", hint="see `kvferry doctor --help`")
    if args.prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens: {args.prompt_tokens}", hint="expected a number from 1 up")
    if args.ttft is not None and not args.ttft > 0:
        raise ConfigError(f"--ttft: {args.ttft:g}", hint="expected milliseconds above 0")
    return Order(
        prefills=tuple(parse_target(text, "prefill") for text in args.prefill),
        decodes=tuple(parse_target(text, "decode") for text in args.decode),
        prompt_tokens=args.prompt_tokens,
        ttft_ms=args.ttft,
        expected=args.expect_transport,
        api_key=args.api_key,
        key=load_key(args.auth_key_file),
    )


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 fine, 1 works but would disappoint, 2 broken, or arguments that can't be used."""
    try:
        order = order_of(args)
        found = asyncio.run(examine(order, lambda finding: print(report.line(finding), flush=True)))
        print("\n".join(report.closing(found)))
        if args.json is not None:
            _write(args.json, json.dumps(report.facts(found), indent=1) + "\n")
    except ConfigError as error:  # not 1, which would say that the path works
        print(f"kvferry: error: {error}", file=sys.stderr)
        return 2
    return found.code


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}", hint="name a file in a folder that exists") from None
