"""The router's command line. `$KVFERRY_ROUTER_COMMAND`, if set, is run in place of `python -m kvferry.cli router`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from kvferry.launch.engine import Engine
from kvferry.launch.ports import LOOPBACK
from kvferry.launch.spec import DeploymentSpec, Mode
from kvferry.launch.state import StateDir


def router_command(spec: DeploymentSpec, plans: Sequence[Engine], mode: Mode, port: int, folder: StateDir) -> list[str]:
    """Engines of a colocated deployment are given as `--decode`: they end every request."""
    start = shlex.split(os.environ.get("KVFERRY_ROUTER_COMMAND", "")) or [sys.executable, "-m", "kvferry.cli", "router"]
    line = [*start, "--host", LOOPBACK, "--port", str(port)]
    for plan in plans:
        line += ["--prefill" if plan.role == "prefill" else "--decode", plan.router_spec()]
    line += ["--connector", mode.connector, "--mode", mode.router_mode, "--story-dir", str(folder.story)]
    line += ["--auth-key-file", str(folder.auth_key)] if mode.connector == "kvferry" else []
    line += ["--bind", spec.bind] if mode.router_mode == "stream" else []
    return [*line, *spec.router_args]
