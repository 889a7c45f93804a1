"""The `kvferry` command. Each subcommand's module is imported when it is asked for: this one loads neither torch nor
vllm nor zmq.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvferry.errors import KVFerryError


@dataclass(frozen=True)
class Command:
    """`module` has `add` (takes the parser) and `run` (takes the parsed arguments, returns the exit code). `rest`: what
    the parser doesn't know is passed on in `rest`, for another program to check.
    """

    help: str
    module: str
    add: str
    run: str
    example: str
    rest: bool = False


LAUNCH = "kvferry.launch.commands"
COMMANDS = {
    "up": Command(
        "start engines and router on this machine",
        LAUNCH,
        "add_up_arguments",
        "up",
        "kvferry up --mode push --prefill 1 --decode 1 --port 8000 --vllm-arg=--max-model-len=2048",
    ),
    "down": Command("stop what `up` started", LAUNCH, "add_state_dir", "down", "kvferry down --state-dir .kvferry"),
    "status": Command("show what runs", LAUNCH, "add_status_arguments", "status", "kvferry status --json"),
    "router": Command(
        "the OpenAI-compatible router",
        "kvferry.router.main",
        "add_arguments",
        "run",
        "kvferry router --port 8000 --connector kvferry --mode push "
        "--prefill http://10.0.0.1:8100,side_channel=10.0.0.1:5600 --decode http://10.0.0.2:8200",
    ),
    "engine": Command(
        "an engine with a timing model in place of the GPU, and real KV memory and transfers",
        "kvferry.engine.main",
        "add_arguments",
        "run",
        "kvferry engine --profile qwen3-32b-h200-tp8 --byte-scale 8 --port 8100",
    ),
    "render": Command(
        "templates, tokens and parsers on CPUs: vLLM's frontend without an engine",
        "kvferry.render.main",
        "add_arguments",
        "run",
        "kvferry render smollm2 --workers 2 --port 8400 --enable-auto-tool-choice --tool-call-parser hermes",
        rest=True,
    ),
    "story": Command(
        "tell what happened to one transfer",
        "kvferry.launch.timeline",
        "add_arguments",
        "run",
        "kvferry story 4f0c2a9be1d84d0fa7c1f6f0a3b5d6e7",
    ),
    "doctor": Command(
        "check the KV path between engines before traffic",
        "kvferry.doctor.main",
        "add_arguments",
        "run",
        "kvferry doctor --prefill http://10.0.0.1:8100,side_channel=10.0.0.1:5600 "
        "--decode http://10.0.0.2:8200,side_channel=10.0.0.2:5600 --prompt-tokens 16000 --ttft 1000",
    ),
    "demo": Command(
        "serve a real model in three ways and compare", "kvferry.launch.demo", "add_arguments", "run", "kvferry demo"
    ),
    "bench": Command(
        "measure and compare",
        "kvferry.bench.main",
        "add_arguments",
        "run",
        "kvferry bench compare --modes push,upstream-push --input-lens 500 --num 10 --json out.json",
    ),
}


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest name; exit code 2."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvferry: error: {message} (see `{self.prog} --help`)\n")


def _overview() -> Parser:
    lines = [f"  {name:<8} {command.help}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="kvferry",
        usage="kvferry COMMAND ...",
        description="Disaggregated prefill and decode serving for vLLM.",
        epilog="commands:\n" + "\n".join(lines) + "\n\nexample: kvferry up --mode push",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser


AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


def _resolve(command: Command) -> tuple[AddArguments, Run]:
    module = importlib.import_module(command.module)
    return getattr(module, command.add), getattr(module, command.run)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    overview = _overview()
    if not arguments or arguments[0].startswith("-"):
        options = overview.parse_args(arguments)
        if options.version:
            from importlib.metadata import version

            print(f"kvferry {version('kvferry')}")
            return 0
        overview.print_help(sys.stderr)
        return 2
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
        overview.error(f"unknown command {name!r}: {hint}")
    command = COMMANDS[name]
    try:
        add, run = _resolve(command)
        parser = Parser(
            prog=f"kvferry {name}",
            description=command.help,
            epilog=f"example: {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(parser)
        if not command.rest:
            return run(parser.parse_args(arguments[1:]))
        parsed, rest = parser.parse_known_args(arguments[1:])
        parsed.rest = rest
        return run(parsed)
    except KVFerryError as error:
        print(f"kvferry: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


if __name__ == "__main__":
    sys.exit(main())
