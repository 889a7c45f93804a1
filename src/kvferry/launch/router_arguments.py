"""`--router-arg` is looked at before anything is started: what the router would refuse, it refuses here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import msgspec

from kvferry.cli import Parser
from kvferry.errors import ConfigError, KVFerryError
from kvferry.launch.engine import Engine
from kvferry.launch.routing import COMMAND, router_arguments
from kvferry.launch.spec import DeploymentSpec, Mode
from kvferry.launch.state import StateDir

PORT, SIDE_PORT = 8100, 5600
"""Of engines that are only spoken of here."""
_OWNED = {
    "host": "the router listens on loopback",
    "port": "use --port of `kvferry up`",
    "connector": "use --mode of `kvferry up`",
    "mode": "use --mode of `kvferry up`",
    "story_dir": "stories are kept in --state-dir of `kvferry up`",
    "auth_key_file": "`kvferry up` makes a key of its own",
}


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint="see `kvferry router --help`")


def check_router_arguments(spec: DeploymentSpec, mode: Mode) -> None:
    """Raises `ConfigError`. Another router's arguments (`$KVFERRY_ROUTER_COMMAND`) are its own."""
    if not spec.router_args or not spec.router or os.environ.get(COMMAND):
        return
    from kvferry.router import main  # aiohttp, uvloop: where they are needed only

    plans = [
        Engine(name, role, PORT + at, SIDE_PORT + at if mode.split else 0, 1, at)
        for at, (name, role) in enumerate(spec.names())
    ]
    own = router_arguments(spec, plans, mode, PORT - 1, StateDir(Path(spec.state_dir or ".")))
    parser = _Parser(prog="kvferry router", add_help=False, allow_abbrev=False)
    main.add_arguments(parser)
    try:
        expected, given = parser.parse_args(own), parser.parse_args([*own, *spec.router_args])
        for name, hint in _OWNED.items():
            if getattr(given, name) != getattr(expected, name):
                raise ConfigError(f"--{name.replace('_', '-')} is set by kvferry itself", hint=hint)
        main.check_files(msgspec.structs.replace(main.config_of(given), auth_key_file="", story_dir=""))
    except KVFerryError as error:
        raise ConfigError(f"--router-arg: {error.message}", hint=error.hint) from None
