"""The command line and environment of one engine, vLLM's or our own.

vLLM is started as a module, not by its `vllm` command: that looks up a distribution of this very name, which the CPU
build does not have. `$KVFERRY_ENGINE_COMMAND`, if set, is run in place of `python -m vllm...api_server` (a profiler
or `numactl` in front of it, or a test's stand-in).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.engine.profile import load as load_profile
from kvferry.launch import rendering
from kvferry.launch.ports import LOOPBACK
from kvferry.launch.spec import DeploymentSpec, Mode, Role, served_name, tensor_parallel
from kvferry.launch.state import StateDir
from kvferry.versions import package_version

MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "kvferry.connector.middleware.CheckTransferParams"
CPU_MAX_MODEL_LEN = 4096
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

# Everything on this machine, nothing asked of the network, nothing reported.
QUIET_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
# CPU build, tuned or not: a KV pool of 1 GiB per engine, UCX over loopback and shared memory.
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "UCX_TLS": "tcp,self,sm"}
# Several engines on few cores: one OpenMP thread that sleeps when it waits, placed by the kernel. With the executor in
# the engine's own process nothing spins on shared memory; vLLM then leaves OpenMP to us.
CPU_TUNED_ENV = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
UPSTREAM_TUNED_ENV = {"KVFERRY_BENCH_NO_AFFINITY": "1"}
"""vLLM's own NIXL connectors pin every engine's main thread to the same last core; our vLLM plugin turns that off."""


@dataclass(frozen=True)
class Engine:
    """One engine as planned. `side_port`: first of `tp` ports in a row, 0 without a connector."""

    name: str
    role: Role
    port: int
    side_port: int
    tp: int
    index: int

    @property
    def engine_id(self) -> str:
        return self.name

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def side_channel(self) -> str:
        return f"{LOOPBACK}:{self.side_port}" if self.side_port else ""

    def router_spec(self) -> str:
        parts = [self.url]
        if self.side_port:
            parts += [f"side_channel={self.side_channel}", f"engine_id={self.engine_id}", f"tp={self.tp}"]
        return ",".join(parts)


@cache
def gpus() -> int:
    """How many CUDA devices engines may use; 0 where vLLM is its CPU build. Loads no torch."""
    if package_version("vllm-cpu") is not None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def kv_transfer_config(spec: DeploymentSpec, mode: Mode, engine: Engine, peers: list[str]) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config`; None for a plain engine."""
    extra = spec.extra_for(engine.role)
    role = "kv_producer" if engine.role == "prefill" else "kv_consumer"
    if mode.connector == "none":
        return None
    if mode.connector == "kvferry":
        ours: dict[str, Any] = {
            "mode": mode.router_mode,
            "side_channel_host": LOOPBACK,
            "side_channel_port": engine.side_port,
            "story_dir": str(Path(spec.state_dir) / "story"),
            "auth_key_file": str(StateDir(Path(spec.state_dir)).auth_key),
        }
        if spec.debug_invariants:
            ours["debug_invariants"] = True
        policy: dict[str, str] = {}
        if engine.role == "decode":
            ours["peers"] = peers
            policy["kv_load_failure_policy"] = spec.kv_load_failure_policy
            if not mode.background:
                ours["background"] = False
        return {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.connector",
            "kv_role": role,
            "engine_id": engine.engine_id,
            **policy,
            "kv_connector_extra_config": {**ours, **extra},
        }
    push = mode.connector == "upstream-push"
    return {
        "kv_connector": "NixlPushConnector" if push else "NixlConnector",
        "kv_role": role if push else "kv_both",
        "engine_id": engine.engine_id,
        "kv_connector_extra_config": {**({"num_threads": 0} if spec.tuned and not gpus() else {}), **extra},
    }


def command(spec: DeploymentSpec, mode: Mode, engine: Engine, model: Path, peers: list[str]) -> list[str]:
    """The engine's command line. The user's arguments come last, so they win."""
    start = shlex.split(os.environ.get("KVFERRY_ENGINE_COMMAND", "")) or [sys.executable, "-m", MODULE]
    args = [*spec.args_for(engine.role), *spec.one_args.get(engine.name, ())]
    if spec.engine == "sim":
        line = [sys.executable, "-m", "kvferry.cli", "engine", "--profile", spec.profile]
        line += ["--host", LOOPBACK, "--port", str(engine.port)]
        line += ["--served-model-name", served_name(spec.model_or_default, args)]
        config = kv_transfer_config(spec, mode, engine, peers)
        if config is not None:
            line += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
        line += rendering.engine_args(spec)
        return [*line, *(["--debug-invariants"] if spec.debug_invariants else []), *args]
    line = [*start, "--host", LOOPBACK, "--port", str(engine.port), "--model", str(model)]
    line += ["--served-model-name", served_name(spec.model_or_default, args), "--dtype", spec.dtype]
    if not gpus():
        line += ["--max-model-len", str(CPU_MAX_MODEL_LEN), "--enforce-eager", "--max-num-seqs", "8"]
        if spec.tuned and engine.tp == 1:
            line += ["--distributed-executor-backend", UNIPROC]
    config = kv_transfer_config(spec, mode, engine, peers)
    if config is not None:
        line += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
    if mode.connector == "kvferry" or spec.render:
        line += ["--middleware", MIDDLEWARE]
    return [*line, *rendering.engine_args(spec), *args]


def default_max_model_len(spec: DeploymentSpec) -> int | None:
    """Of engines whose arguments name none; None: vLLM reads it from the model."""
    if spec.engine == "sim":
        return load_profile(spec.profile).limits.max_model_len
    return None if gpus() else CPU_MAX_MODEL_LEN


def environment(spec: DeploymentSpec, mode: Mode, engine: Engine, scratch: Path) -> dict[str, str]:
    """The engine's environment. Our defaults give way to what the caller exported, the tuned settings do not (the same
    speed on every machine), the spec's `env` wins over all. `scratch`: a short path for vLLM's sockets
    and what else it leaves in the temporary folder.
    """
    ours: dict[str, str] = dict(QUIET_ENV)
    if spec.engine == "sim":
        return {**ours, "UCX_TLS": CPU_ENV["UCX_TLS"], **os.environ, **spec.env}
    fixed: dict[str, str] = {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
    if not gpus():
        ours |= CPU_ENV
        if spec.tuned:
            fixed |= CPU_TUNED_ENV
    if mode.connector.startswith("upstream"):
        fixed |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.side_port)}
        if spec.tuned:
            fixed |= UPSTREAM_TUNED_ENV
    return {**ours, **os.environ, **gpu_share(engine), **fixed, **spec.env}


def gpu_share(engine: Engine) -> Mapping[str, str]:
    """On GPUs each engine gets the next `tp` devices; with too few of them the caller places engines himself."""
    count = gpus()
    first = engine.index * engine.tp
    if count == 0 or first + engine.tp > count:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named is not None else [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + engine.tp])}


def plan_tp(spec: DeploymentSpec, role: Role) -> int:
    return tensor_parallel(spec.args_for(role))
