"""`kvferry bench soak`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvferry.bench.arguments import above_zero, words
from kvferry.bench.environment import environment
from kvferry.bench.points import check_writable
from kvferry.bench.report import write_json
from kvferry.bench.setup_arguments import drop, state_folder
from kvferry.bench.soak import Plan, Soak, sim_spec, vllm_spec
from kvferry.bench.soak_asks import of_sim, of_vllm
from kvferry.bench.soak_trouble import Pace
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.cancel import Cancel, Stopped
from kvferry.launch.commands import say
from kvferry.launch.spec import DEFAULT_PROFILE, ENGINES

MODES = ("push", "stream", "pull")
SIM_PACE = Pace(every_s=2.0, apart_s=8.0, ready_s=30.0)
VLLM_PACE = Pace(every_s=6.0, apart_s=60.0, ready_s=240.0)
SIM_BOUND_S, VLLM_BOUND_S = 15.0, 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="sim", help="sim: two of each role; vllm: one of each (default: sim)")
    add("--profile", default=DEFAULT_PROFILE, metavar="NAME", help="sim: model and machine (default: instant)")
    add("--model", default="", metavar="M", help="vllm: smollm2, or the folder of a model (default: smollm2)")
    add("--modes", type=words, default=list(MODES), metavar="M1,M2", help=f"at once (default: {','.join(MODES)})")
    add("--minutes", type=above_zero, default=20.0, metavar="N", help="of trouble (default: 20)")
    add("--seed", type=int, default=0, help="of requests and troubles (default: 0)")
    add("--workers", type=int, default=0, metavar="N", help="clients at once (default: sim 6, vllm 2)")
    add(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="keep logs and stories there (default: dropped after success)",
    )
    add("--json", type=Path, metavar="F", help="write the facts of the run")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if anything was violated; 130 if stopped."""
    if args.workers < 0:
        raise ConfigError(f"--workers: {args.workers}", hint="expected 1 or more")
    for mode in args.modes:
        if mode not in MODES:
            raise unknown_name("--modes", mode, MODES)
    check_writable("--json", args.json)
    cancel = Cancel()
    cancel.catch_signals()
    with state_folder(args.state_dir, "kvferry-soak-") as state:
        try:
            facts = soak(args, state, cancel)
        except Stopped:
            drop(args.state_dir, state)
            say("stopped")
            return 130
        if facts["violations"]:
            say(f"logs: {state}")
        else:
            drop(args.state_dir, state)
    if args.json:
        write_json(args.json, facts)
    print(text(facts), flush=True)
    return 1 if facts["violations"] else 0


def soak(args: argparse.Namespace, state: Path, cancel: Cancel) -> dict[str, Any]:
    """The facts of a run. Raises `LaunchError`, `ConfigError`, `Stopped`."""
    is_sim = args.engine == "sim"
    spec = sim_spec(args.profile, state) if is_sim else vllm_spec(args.model, state)
    asks = of_sim(args.profile, args.seed) if is_sim else of_vllm(spec, args.seed, say, cancel)
    plan = Plan(
        spec,
        tuple(args.modes),
        args.minutes,
        args.seed,
        SIM_PACE if is_sim else VLLM_PACE,
        SIM_BOUND_S if is_sim else VLLM_BOUND_S,
        workers=args.workers or (6 if is_sim else 2),
    )
    return Soak(plan, asks, say, cancel).run() | {"environment": environment()}


def text(facts: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{facts['requests']} requests in {facts['seconds']:.0f} s, seed {facts['seed']}: "
        + ", ".join(f"{count} {kind}" for kind, count in facts["endings"].items()),
        "errors: " + (", ".join(f"{count} {code}" for code, count in facts["errors_by_code"].items()) or "none"),
        "troubles: " + ", ".join(f"{count} {kind}" for kind, count in facts["troubles"].items()),
        f"slowest end after {facts['slowest_s']:g} s, the bound is {facts['bound_s']:g} s",
    ]
    for life in facts["memory"]:
        if life["judged"]:
            lines.append(
                f"{life['name']} pid {life['pid']}: {life['rss_mib_median']} MiB over {life['seconds']:.0f} s, "
                f"{life['slope_mib_per_minute']:+.3f} MiB a minute"
            )
    violations = facts["violations"]
    return "\n".join([*lines, *(f"VIOLATION {one}" for one in violations), f"{len(violations)} violations"])
