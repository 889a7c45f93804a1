"""The router's arguments about which engines take a request: they are `RouterConfig`'s fields of these names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from kvferry.errors import unknown_name
from kvferry.router.choice.disaggregate import parse_setting
from kvferry.router.choice.policy import POLICIES
from kvferry.router.config import Action, RouterConfig


def add_selection(parser: argparse.ArgumentParser) -> None:
    default = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
    group = parser.add_argument_group("which engines take a request (docs/router.md)")
    add, names = group.add_argument, ", ".join(POLICIES)
    for role in ("prefill", "decode"):
        add(
            f"--{role}-policy",
            type=_one_of(f"--{role}-policy", POLICIES),
            default=default[f"{role}_policy"],
            metavar="P",
            help=f"{names} (default: %(default)s)" if role == "prefill" else "the same (default: %(default)s)",
        )
    add(
        "--disaggregate",
        type=parse_setting,
        default=default["disaggregate"],
        metavar="WHEN",
        help="send a prompt through prefill always, when that pays by what was measured (auto), or from so many "
        "uncached tokens up; else decode computes it itself (default: %(default)s)",
    )
    add("--ttft-slo", type=float, default=0.0, metavar="MS", help="objective for the first token; 0: none (default)")
    add(
        "--slo-action",
        type=_one_of("--slo-action", get_args(Action)),
        default=default["slo_action"],
        metavar="A",
        help="for a request that can't meet it: queue, shed (429) or colocate (default: %(default)s)",
    )
    add(
        "--slo-queue",
        type=int,
        default=default["slo_queue"],
        metavar="N",
        help="waiting at most (default: %(default)s)",
    )
    add(
        "--session-ttl",
        type=float,
        default=default["session_ttl_s"],
        metavar="S",
        help="a session that nobody used for so long is forgotten (default: %(default)g)",
    )
    add(
        "--prefix-tokens",
        type=int,
        default=default["prefix_tokens"],
        metavar="N",
        help="what one engine's prefix cache holds; 0: as the engine tells (default)",
    )


def selection_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `RouterConfig`."""
    return {
        "prefill_policy": args.prefill_policy,
        "decode_policy": args.decode_policy,
        "disaggregate": args.disaggregate,
        "ttft_slo_ms": args.ttft_slo,
        "slo_action": args.slo_action,
        "slo_queue": args.slo_queue,
        "session_ttl_s": args.session_ttl,
        "prefix_tokens": args.prefix_tokens,
    }


def _one_of(what: str, names: tuple[str, ...]) -> Callable[[str], str]:
    """For argparse: the error names the nearest one."""

    def check(name: str) -> str:
        if name not in names:
            raise unknown_name(what, name, names)
        return name

    return check
