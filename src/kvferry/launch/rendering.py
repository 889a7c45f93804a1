"""The render tier of a deployment: its command line, and what the engines behind it need.

`$KVFERRY_RENDER_COMMAND`, if set, is run in place of `python -m kvferry.cli render`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.launch.ports import LOOPBACK
from kvferry.launch.spec import DeploymentSpec, arg_value, served_name

RENDER = "render"
SIM_TOKENIZER = "smollm2"
"""What sim engines speak when a tier renders for them and no `--tokenizer` is named: the tier needs a model's own."""
ENGINE_ONLY = ("--tokens-only", "--skip-tokenizer-init", "--enable-scale-out")
"""An engine without tokenizer, or with its routes opened; a tier has both."""
SIM_FRONTEND = ("--served-model-name", "--max-model-len", "--api-key")


def engine_args(spec: DeploymentSpec) -> list[str]:
    """What engines are given so that a tier can render for them; nothing without one."""
    if not spec.render:
        return []
    if spec.engine == "sim":
        return ["--tokenizer", sim_tokenizer(spec)]
    return ["--enable-scale-out"] if scale_out_is_a_flag() else []


def sim_tokenizer(spec: DeploymentSpec) -> str:
    """The name or folder that all sim engines speak. Raises `ConfigError` for the one that no tier can read."""
    name = arg_value(spec.vllm_args, "--tokenizer") or SIM_TOKENIZER
    if name == "builtin":
        raise ConfigError(
            "--tokenizer: 'builtin' with --render", hint="a tier needs a model's own: smollm2, or a folder"
        )
    return name


@cache
def scale_out_is_a_flag() -> bool:
    """Whether the installed vLLM opens /inference/v1/generate by a flag. Its source is read, not loaded."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found else []:
        entrypoints = Path(folder) / "entrypoints"
        for file in (entrypoints / "launchers" / "cli_args.py", entrypoints / "openai" / "cli_args.py"):
            if file.is_file() and "enable_scale_out" in file.read_text():
                return True
    return False


def render_command(spec: DeploymentSpec, model: Path, port: int, max_model_len: int | None) -> list[str]:
    """`model`: the folder whose tokenizer the engines speak. `max_model_len`: of engines that were not told one.

    vLLM engines and the tier read their arguments with the same parser of vLLM's, and each uses what is its own: so the
    tier is given what all engines are given, and no list of ours can miss a flag. The user's come last.
    """
    start = shlex.split(os.environ.get("KVFERRY_RENDER_COMMAND", "")) or [sys.executable, "-m", "kvferry.cli", RENDER]
    shared = spec.vllm_args if spec.engine == "vllm" else _sim_frontend(spec.vllm_args)
    args = [arg for arg in shared if arg.partition("=")[0].replace("_", "-") not in ENGINE_ONLY]
    line = [*start, str(model), "--workers", str(spec.render), "--host", LOOPBACK, "--port", str(port)]
    line += ["--served-model-name", served_name(spec.model_or_default, spec.vllm_args)]
    if max_model_len is not None:
        line += ["--max-model-len", str(max_model_len)]
    if spec.engine == "sim":  # its profile may allow more tokens than the model that lends its tokenizer was made for
        longest = int(arg_value(args, "--max-model-len") or max_model_len or 0)
        line += ["--hf-overrides", json.dumps({"max_position_embeddings": longest})]
    else:
        line += ["--dtype", spec.dtype]
    return [*line, *args, *spec.render_args]


def _sim_frontend(args: Sequence[str]) -> list[str]:
    """Of a sim engine's arguments those that its frontend has in common with vLLM's."""
    kept: list[str] = []
    for name in SIM_FRONTEND:
        value = arg_value(args, name)
        kept += [] if value is None else [name, value]
    return kept


def render_environment(spec: DeploymentSpec, quiet: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """`scratch`: a short path for vLLM's temporary files. Libraries get one thread each: workers share the cores."""
    fixed = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    return {**quiet, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, **fixed, **spec.env}
