"""What to start: modes, and the frozen description of one deployment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvferry.engine.profile import load as load_profile
from kvferry.errors import ConfigError, unknown_name
from kvferry.router.config import check_bind

Role = Literal["prefill", "decode", "colocated"]


@dataclass(frozen=True)
class Mode:
    """`connector` and `router_mode` are what the router is told; `background` False posts in the engine loop."""

    name: str
    connector: Literal["kvferry", "upstream-pull", "upstream-push", "none"]
    router_mode: Literal["push", "pull", "stream", "colocated"]
    background: bool = True

    @property
    def split(self) -> bool:
        return self.connector != "none"


MODES = {
    mode.name: mode
    for mode in (
        Mode("colocated", "none", "colocated"),
        Mode("pull", "kvferry", "pull"),
        Mode("pull-inline", "kvferry", "pull", background=False),
        Mode("push", "kvferry", "push"),
        Mode("stream", "kvferry", "stream"),
        Mode("upstream-pull", "upstream-pull", "pull"),
        Mode("upstream-push", "upstream-push", "push"),
    )
}
ENGINES = ("vllm", "sim")
DEFAULT_MODEL = "smollm2"
DEFAULT_PROFILE = "instant"


def mode_named(name: str) -> Mode:
    if name not in MODES:
        raise unknown_name("mode", name, MODES)
    return MODES[name]


@dataclass(frozen=True)
class DeploymentSpec:
    """One deployment on this machine.

    `engine` 'sim': kvferry's own, its time modelled by `profile`; `vllm_args` then go to it, it knows vLLM's names.
    `model` '': `smollm2`, or the profile's name. `extra_config` goes into `kv_connector_extra_config` of every engine,
    the per-role ones over it. `kv_load_failure_policy`: vLLM's, what decode does when the KV does not come.
    `debug_invariants`: engines end if anything is left behind when nothing runs. `tuned` False starts engines as vLLM
    ships them. `port` 0: any free one. `bind`: the router's, of mode `stream`. `one_args`: engine's name -> further
    arguments of that engine, the last ones. `render`: workers of a render tier; 0: engines render themselves.
    """

    mode: str = "push"
    engine: str = "vllm"
    profile: str = DEFAULT_PROFILE
    model: str = ""
    prefill: int = 1
    decode: int = 1
    bind: str = "early"
    port: int = 0
    dtype: str = "bfloat16"
    vllm_args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    one_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    prefill_extra_config: Mapping[str, Any] = field(default_factory=dict)
    decode_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    tuned: bool = True
    router: bool = True
    router_args: Sequence[str] = ()
    render: int = 0
    render_args: Sequence[str] = ()
    debug_invariants: bool = False
    warm_up: bool = True
    state_dir: str | os.PathLike[str] = ""
    ready_timeout_s: float = 600.0

    def check(self) -> Mode:
        """The mode, or a ConfigError for what cannot be started."""
        mode = mode_named(self.mode)
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES)
        if self.engine == "sim":
            load_profile(self.profile)
        if self.engine == "sim" and mode.connector.startswith("upstream"):
            hint = (
                "sim engines carry kvferry's connector only; pull-inline posts in the engine loop, as upstream's pull"
            )
            raise ConfigError(f"mode {mode.name!r} needs vLLM engines", hint=hint)
        if mode.split and self.prefill < 1:
            raise ConfigError(f"prefill: {self.prefill} engines, mode {mode.name!r} needs at least 1")
        check_bind(self.bind, f"mode {mode.name!r}", mode.router_mode == "stream")
        if self.decode < 1:
            raise ConfigError(f"decode: {self.decode} engines, at least 1 is needed")
        if self.render < 0:
            raise ConfigError(f"render: {self.render} workers", hint="expected 0 or more; 0 starts no render tier")
        if self.port and not 0 < self.port < 65536:
            raise ConfigError(f"port: {self.port} is not a port", hint="1 to 65535, or 0 for any free one")
        for name in self.one_args:
            if name not in dict(self.names()):
                raise unknown_name("engine", name, dict(self.names()))
        for arg in (*self.vllm_args, *self.prefill_args, *self.decode_args, *itertools.chain(*self.one_args.values())):
            if arg.split("=")[0] in OWNED_ARGS:
                raise ConfigError(f"vllm argument {arg!r} is set by kvferry itself", hint=OWNED_ARGS[arg.split("=")[0]])
        return mode

    @property
    def model_or_default(self) -> str:
        return self.model or (DEFAULT_MODEL if self.engine == "vllm" else self.profile)

    def names(self) -> list[tuple[str, Role]]:
        """The engines by name and role. Colocated: `decode` of them, each does both."""
        mode = mode_named(self.mode)
        if not mode.split:
            return [(f"engine-{index}", "colocated") for index in range(self.decode)]
        prefill: list[tuple[str, Role]] = [(f"prefill-{index}", "prefill") for index in range(self.prefill)]
        return prefill + [(f"decode-{index}", "decode") for index in range(self.decode)]

    def args_for(self, role: Role) -> list[str]:
        own = {"prefill": self.prefill_args, "decode": self.decode_args, "colocated": self.decode_args}[role]
        return [*self.vllm_args, *own]

    def extra_for(self, role: Role) -> dict[str, Any]:
        own = self.prefill_extra_config if role == "prefill" else self.decode_extra_config
        return {**self.extra_config, **own}


OWNED_ARGS = {
    "--host": "engines listen on loopback",
    "--port": "engines get free ports; the router's port is --port of `kvferry up`",
    "--model": "use --model of `kvferry up`",
    "--kv-transfer-config": "use --mode, and extra_config in Python",
}


ENGINE_ARG_HELP = "for one engine, by its name: decode-3:--profile=slow.yaml"


def engine_args(texts: Sequence[str]) -> dict[str, list[str]]:
    """`NAME:ARG`s by name. Raises `ConfigError`."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, colon, arg = text.partition(":")
        if not colon or not name or not arg:
            raise ConfigError(f"--engine-arg: {text!r}", hint="expected NAME:ARG, as decode-0:--max-num-seqs=4")
        found.setdefault(name, []).append(arg)
    return found


def arg_value(args: Sequence[str], *names: str) -> str | None:
    """The value that the last of these options has in a vLLM command line, None if absent."""
    value = None
    for index, arg in enumerate(args):
        name, equals, rest = arg.partition("=")
        if name.replace("_", "-") in names:
            value = rest if equals else (args[index + 1] if index + 1 < len(args) else None)
    return value


def served_name(model: str, args: Sequence[str]) -> str:
    """The name under which a model is served."""
    return arg_value(args, "--served-model-name") or (model if os.sep not in model else Path(model).name)


def tensor_parallel(args: Sequence[str]) -> int:
    value = arg_value(args, "--tensor-parallel-size", "-tp", "--tp")
    try:
        size = int(value) if value is not None else 1
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"--tensor-parallel-size: {value!r} is not a whole number from 1 up")
    return size
