"""Arguments that every measurement of a deployment takes: what to start, or which router to ask; how to load it."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry.bench.arguments import words
from kvferry.bench.load import AUTO, NAMES, Load
from kvferry.bench.measure import Rules
from kvferry.bench.mix import KINDS
from kvferry.bench.target import Setup
from kvferry.bench.workload import Prompts
from kvferry.errors import ConfigError
from kvferry.launch.spec import DEFAULT_PROFILE, ENGINE_ARG_HELP, ENGINES, MODES, DeploymentSpec, engine_args

MEASURED_PROFILE = "smollm2-cpu"
"""Of engine sim, where none is named: `kvferry up` models no time by default, which leaves little to measure."""


def add_setup(parser: argparse.ArgumentParser, modes: str) -> None:
    """`modes`: the default."""
    add = parser.add_argument
    add("--engine", default="vllm", help=f"one of: {', '.join(ENGINES)} (default: vllm)")
    add("--profile", default="", metavar="P", help=f"timing and KV of engine sim (default: {MEASURED_PROFILE})")
    add("--model", default="", help="smollm2, or a model's folder (default: smollm2); of engine sim the tokenizer only")
    add("--dtype", default="bfloat16", help="of weights and KV (default: bfloat16)")
    add("--modes", type=words, default=words(modes), metavar="A,B", help=f"of {', '.join(MODES)} (default: {modes})")
    add("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    add("--decode", type=int, default=1, metavar="N", help="decode or colocated engines (default: 1)")
    add("--vllm-arg", action="append", default=[], metavar="ARG", help="argument for every engine")
    add("--prefill-arg", action="append", default=[], metavar="ARG", help="for prefill engines only")
    add("--decode-arg", action="append", default=[], metavar="ARG", help="for decode engines only")
    add("--engine-arg", action="append", default=[], metavar="NAME:ARG", help=ENGINE_ARG_HELP)
    add("--router-arg", action="append", default=[], metavar="ARG", help="argument for the router, as a policy")
    add("--router", default="", metavar="URL", help="start nothing, ask this router, in the one mode of --modes")
    add(
        "--story-dir",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="with --router: stories of router and engines; repeat it for several folders",
    )
    add("--kv-bytes", type=int, metavar="N", help="with --router: of one prompt token, if not as --model says")
    add("--block-size", type=int, metavar="N", help="with --router: tokens per block, if the engines don't tell")


def add_load(parser: argparse.ArgumentParser, load: str, num: int) -> None:
    default = Rules()
    add = parser.add_argument
    what = "vLLM's where it is installed, else aiperf" if load == AUTO else load
    add("--load", default=load, metavar="L", help=f"load generator: {', '.join(NAMES)} (default: {what})")
    add("--num", type=int, default=num, metavar="N", help=f"requests of a run (default: {num})")
    add("--arrival", choices=("poisson", "constant"), default=default.arrival, help="(default: poisson)")
    add(
        "--prompts",
        choices=("text", "ids"),
        help="how they are sent (default: text by vLLM's generator to vLLM's engines, else token ids)",
    )
    add("--workload", choices=KINDS, default=default.kind, help="mixed: see bench/README.md (default: random)")
    add("--seed", type=int, default=default.seed, metavar="S", help="of prompts and arrivals (default: 0)")
    add("--warm-ups", type=int, default=default.warm_ups, metavar="N", help="requests before each run (default: 2)")
    add("--timeout", type=float, default=default.timeout_s, metavar="S", help="of one request (default: 300)")
    add("--state-dir", type=Path, metavar="DIR", help="keep logs and stories there (default: dropped after success)")


def setup_of(args: argparse.Namespace) -> Setup:
    """Raises `ConfigError`."""
    profile = profile_of(args)
    check_modes(args, "--modes", args.modes)
    if not args.modes:
        raise ConfigError("--modes: at least one mode is needed")
    _check_router(args)
    return Setup(
        engine=args.engine,
        profile=profile,
        model=args.model,
        dtype=args.dtype,
        prefill=args.prefill,
        decode=args.decode,
        args=args.vllm_arg,
        prefill_args=args.prefill_arg,
        decode_args=args.decode_arg,
        one_args=engine_args(args.engine_arg),
        router_args=args.router_arg,
        router=args.router,
        story_dirs=args.story_dir,
        kv_bytes=args.kv_bytes,
        block_size=args.block_size,
    )


def profile_of(args: argparse.Namespace) -> str:
    """The profile of `--engine sim`, "" of vLLM, which has none. Raises `ConfigError`."""
    if args.engine == "sim":
        return args.profile or MEASURED_PROFILE
    if args.profile:
        raise ConfigError(f"--profile: {args.profile!r} is for --engine sim", hint="add --engine sim, or drop it")
    return ""


def check_modes(args: argparse.Namespace, option: str, modes: Sequence[str]) -> None:
    """Raises `ConfigError` for what could not be started, or would be measured twice."""
    if len(set(modes)) < len(modes):
        raise ConfigError(f"{option}: a mode is named twice")
    for mode in modes:
        profile = profile_of(args) or DEFAULT_PROFILE
        DeploymentSpec(mode=mode, engine=args.engine, profile=profile, vllm_args=args.vllm_arg).check()


def _check_router(args: argparse.Namespace) -> None:
    if args.router and (args.router_arg or args.engine_arg):
        raise ConfigError("--router-arg with --router", hint="it runs already, with arguments of its own")
    described = [name for name in ("story_dir", "kv_bytes", "block_size") if getattr(args, name)]
    if not args.router:
        if described:
            option = f"--{described[0].replace('_', '-')}"
            raise ConfigError(f"{option}: only with --router", hint="what is started here is known already")
        return
    if len(args.modes) != 1:
        raise ConfigError(f"--modes: {','.join(args.modes)!r} with --router", hint="name the one mode it runs in")
    if not args.router.startswith(("http://", "https://")):
        raise ConfigError(f"--router: {args.router!r} is no URL", hint="expected for example http://127.0.0.1:8000")
    for folder in args.story_dir:
        if not folder.is_dir():
            raise ConfigError(f"--story-dir: {folder} is no folder", hint="the routers' and engines' story_dir")


def rules_of(args: argparse.Namespace, load: Load) -> Rules:
    """Raises `ConfigError`."""
    if args.prompts == "text" and not load.texts:
        raise ConfigError(f"--prompts: {load.name} sends token ids only", hint="--load vllm sends texts")
    if args.workload == "mixed" and load.name != "builtin":
        raise ConfigError(f"--workload: mixed with --load {load.name}", hint="--load builtin")
    texts = load.texts and args.engine == "vllm"
    bounds: Sequence[tuple[str, float, float]] = (
        ("--num", args.num, 1),
        ("--seed", args.seed, 0),
        ("--warm-ups", args.warm_ups, 0),
        ("--timeout", args.timeout, 0.001),
    )
    for name, value, least in bounds:
        if value < least:
            raise ConfigError(f"{name}: {value:g}", hint=f"expected {least:g} or more")
    prompts: Prompts = args.prompts or ("text" if texts else "ids")
    return Rules(args.num, args.arrival, args.seed, args.warm_ups, args.timeout, prompts, args.workload)


@contextmanager
def state_folder(given: Path | None, prefix: str) -> Iterator[Path]:
    """The folder for logs and stories: `given`, or one of our own, which is left only if it holds something and the
    caller has not removed it.
    """
    if given is not None:
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield made
    finally:
        if made.is_dir() and not any(path.is_file() for path in made.rglob("*")):
            shutil.rmtree(made, ignore_errors=True)


def drop(given: Path | None, made: Path) -> None:
    """Remove a folder of our own with all that is in it."""
    if given is None:
        shutil.rmtree(made, ignore_errors=True)
