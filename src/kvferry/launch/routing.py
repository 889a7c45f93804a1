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

COMMAND = "KVFERRY_ROUTER_COMMAND"


def router_command(
    spec: DeploymentSpec, plans: Sequence[Engine], mode: Mode, port: int, folder: StateDir, render_url: str = ""
) -> list[str]:
    """The whole line, those of `spec` last."""
    start = shlex.split(os.environ.get(COMMAND, "")) or [sys.executable, "-m", "kvferry.cli", "router"]
    return [*start, *router_arguments(spec, plans, mode, port, folder, render_url), *spec.router_args]


def router_arguments(
    spec: DeploymentSpec, plans: Sequence[Engine], mode: Mode, port: int, folder: StateDir, render_url: str = ""
) -> list[str]:
    """Ours. Engines of a colocated deployment are given as `--decode`: they end every request."""
    line = ["--host", LOOPBACK, "--port", str(port)]
    for plan in plans:
        line += ["--prefill" if plan.role == "prefill" else "--decode", plan.router_spec()]
    line += ["--connector", mode.connector, "--mode", mode.router_mode, "--story-dir", str(folder.story)]
    line += ["--auth-key-file", str(folder.auth_key)] if mode.connector == "kvferry" else []
    line += ["--bind", spec.bind] if mode.router_mode == "stream" else []
    line += ["--render", render_url] if render_url else []
    return line
