"""`kvferry bench compare`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from kvferry.bench import report as reports
from kvferry.bench.arguments import lengths, words
from kvferry.bench.compare import Settings, compare, rounds_plan
from kvferry.bench.setup_arguments import MEASURED_PROFILE, check_modes, profile_of
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel, Stopped
from kvferry.launch.commands import say
from kvferry.launch.spec import ENGINES

VLLM_MODES = ["push", "upstream-push", "pull", "upstream-pull", "colocated"]
SIM_MODES = ["push", "pull", "pull-inline", "colocated"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings(())
    add = parser.add_argument
    add("--engine", default="vllm", help=f"one of: {', '.join(ENGINES)} (default: vllm)")
    add("--model", default=default.model, help="smollm2, or the folder of a model (default: smollm2)")
    add("--dtype", default=default.dtype, help="of weights and KV (default: bfloat16)")
    add("--profile", default="", metavar="P", help=f"timing and KV of engine sim (default: {MEASURED_PROFILE})")
    add("--modes", type=words, metavar="A,B", help="what to compare (default: all that the engine has)")
    add("--as-shipped", type=words, default=[], metavar="A,B", help="measure these also as vLLM ships them")
    add("--input-lens", type=lengths, default=list(default.input_lens), metavar="L1,L2", help="prompt tokens")
    add("--output-tokens", type=int, default=default.output_tokens, metavar="N")
    add("--num", type=int, default=default.num, metavar="N", help="requests per mode and length, over all rounds")
    add("--as-shipped-num", type=int, default=default.as_shipped_num, metavar="N")
    add("--rounds", type=int, default=default.rounds, metavar="R", help="starts per mode (default: 2)")
    add("--qps", type=float, metavar="Q", help="open loop at this rate (default: one request at a time)")
    add("--arrival", choices=("poisson", "constant"), default=default.arrival, help="with --qps (default: poisson)")
    add("--max-in-flight", type=int, default=default.max_in_flight, metavar="N", help="with --qps")
    add("--seed", type=int, default=default.seed)
    add("--timeout", type=float, default=default.timeout_s, metavar="S", help="of one request (default: 300)")
    add("--no-warm-up", action="store_true", help="measure the first request without the launcher's warm-up")
    add("--vllm-arg", action="append", default=[], metavar="ARG", help="argument for every engine")
    add("--state-dir", type=Path, metavar="DIR", help="keep logs and stories there (default: dropped after success)")
    add("--json", type=Path, metavar="F", help="write everything, raw samples too")
    add("--markdown", type=Path, metavar="F", help="write the tables as markdown")
    add("--require", action="store_true", help="exit 1 also if a bound is not met")


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    folder = args.state_dir or Path(tempfile.mkdtemp(prefix="kvferry-bench-"))
    cancel = Cancel()
    cancel.catch_signals()
    each = "a quarter of a minute" if settings.engine == "sim" else "a minute"
    say(f"{len(rounds_plan(settings))} engine starts of about {each} each; logs in {folder}")
    try:
        facts = reports.facts_of(settings, compare(settings, folder, say, cancel))
    except Stopped:
        say("stopped")
        return 130
    print(reports.text(facts))
    if args.json:
        reports.write_json(args.json, facts)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(reports.markdown(facts))
    sys.stdout.flush()
    if not args.state_dir:
        shutil.rmtree(folder, ignore_errors=True)
    missed = [line["name"] for line in [*facts["ratios"], *facts["hooks"]] if line["met"] is not True]
    if args.require and missed:
        say(f"kvferry: error: bounds not met: {', '.join(missed)}")
        return 1
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    """Raises `ConfigError`."""
    profile, sim = profile_of(args), args.engine == "sim"
    if args.modes is None:
        args.modes = SIM_MODES if sim else VLLM_MODES
    if args.require and sim:
        raise ConfigError("--require: no bound is judged for engine sim", hint="drop it, or --engine vllm")
    if args.as_shipped and sim:
        raise ConfigError("--as-shipped: engine sim has no such variant", hint="drop it, or --engine vllm")
    check_modes(args, "--modes", args.modes)
    check_modes(args, "--as-shipped", args.as_shipped)
    if not args.modes:
        raise ConfigError("--modes: at least one mode is needed")
    if args.output_tokens < 2:
        raise ConfigError(f"--output-tokens: {args.output_tokens}, TPOT needs at least 2")
    if args.rounds < 1 or args.num < args.rounds:
        raise ConfigError(f"--num: {args.num} requests cannot be spread over --rounds {args.rounds}")
    if args.as_shipped_num < 1 or args.max_in_flight < 1 or args.timeout <= 0 or args.seed < 0:
        raise ConfigError("--as-shipped-num, --max-in-flight, --timeout: from 1 up; --seed: from 0 up")
    if args.qps is not None and args.qps <= 0:
        raise ConfigError(f"--qps: {args.qps:g} is not above 0")
    return Settings(
        modes=args.modes,
        as_shipped=args.as_shipped,
        engine=args.engine,
        profile=profile,
        model=args.model,
        dtype=args.dtype,
        input_lens=args.input_lens,
        output_tokens=args.output_tokens,
        num=args.num,
        as_shipped_num=args.as_shipped_num,
        rounds=args.rounds,
        qps=args.qps,
        arrival=args.arrival,
        max_in_flight=args.max_in_flight,
        seed=args.seed,
        warm_up=not args.no_warm_up,
        timeout_s=args.timeout,
        vllm_args=args.vllm_arg,
    )
