"""What load is sent to: a deployment that is started for it, or a router that runs already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench import kv as kv_facts
from kvferry.bench.kv import KvFacts
from kvferry.bench.load import Load
from kvferry.bench.witness import Engines, Stories, engine_metrics
from kvferry.bench.workload import ModelFacts, Prompts
from kvferry.errors import ConfigError, EngineError
from kvferry.launch import model as models
from kvferry.launch.cancel import Cancel
from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DEFAULT_MODEL, DEFAULT_PROFILE, DeploymentSpec, Mode, mode_named
from kvferry.launch.web import get_json

Report = Callable[[str], None]
PUBLISHED_ARGS = ("--no-enable-prefix-caching",)


def indented(report: Report) -> Report:
    """For what a deployment says while it starts, less its every few seconds."""
    return lambda line: None if ": loading " in line else report(f"  {line}")


@dataclass(frozen=True)
class Setup:
    """What is measured, but for its mode. `router`: URL of one that runs, then nothing is started and `engine`,
    `profile`, `model`, `args` only describe it. `model` '': `smollm2`, of which engine sim takes the tokenizer only.
    `kv_bytes`: of one prompt token, where neither model nor profile tell. `one_args`: engine's name -> arguments.
    """

    engine: str = "vllm"
    profile: str = ""
    model: str = ""
    dtype: str = "bfloat16"
    prefill: int = 1
    decode: int = 1
    args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    one_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    router_args: Sequence[str] = ()
    router: str = ""
    story_dirs: Sequence[Path] = ()
    kv_bytes: int | None = None
    block_size: int | None = None

    @property
    def start_s(self) -> float:
        """About how long a start takes."""
        return 0.0 if self.router else 12.0 if self.engine == "sim" else 60.0

    def facts(self) -> dict[str, Any]:
        """What two results must have in common to be of one sweep."""
        more = {
            "prefill_args": list(self.prefill_args),
            "decode_args": list(self.decode_args),
            "one_args": {name: list(args) for name, args in self.one_args.items()},
            "router_args": list(self.router_args),
        }
        return {
            **{name: value for name, value in more.items() if value},
            "engine": self.engine,
            "profile": self.profile,
            "model": self.model or DEFAULT_MODEL,
            "dtype": self.dtype,
            "prefill": self.prefill,
            "decode": self.decode,
            "engine_args": list(self.args),
            "router": bool(self.router),
        }


@dataclass
class Target:
    """Ready to be asked. `words`: token ids for prompts. `died`: why it can't be asked any more, "" while it can."""

    url: str
    model: str
    mode: Mode
    engines: Engines
    stories: Stories
    kv: KvFacts | None
    words: ModelFacts
    tokenizer: Path | None
    died: Callable[[], str]

    def router_modes(self) -> dict[str, float]:
        """Requests that the router answered, by its mode."""
        found: dict[str, float] = {}
        for name, labels, value in engine_metrics(self.url):
            if name == "kvferry_router_requests_total":
                found[labels["mode"]] = found.get(labels["mode"], 0.0) + value
        return found


def model_folder(setup: Setup, load: Load, report: Report, cancel: Cancel) -> Path | None:
    """The model's files, for its tokenizer and the size of its KV; None where nobody needs them."""
    if setup.engine == "sim" and not load.tokenizer:
        return None
    return models.prepare(setup.model or DEFAULT_MODEL, report=report, cancel=cancel)


@contextmanager
def opened(
    setup: Setup, mode_name: str, state: Path, load: Load, prompts: Prompts, report: Report, cancel: Cancel
) -> Iterator[Target]:
    """Where `prompts` are texts, engines with a timing model get the tokenizer of `load`. Raises `KVFerryError`."""
    mode = mode_named(mode_name)
    folder = model_folder(setup, load, report, cancel)
    if setup.router:
        yield _of_router(setup, mode, folder)
        return
    args = [*PUBLISHED_ARGS, *setup.args]
    if setup.engine == "sim" and prompts == "text":
        args = ["--tokenizer", str(folder), *args]
    spec = DeploymentSpec(
        mode=mode.name,
        engine=setup.engine,
        profile=setup.profile or DEFAULT_PROFILE,
        model=setup.model if setup.engine == "vllm" else "",
        dtype=setup.dtype,
        prefill=setup.prefill,
        decode=setup.decode,
        vllm_args=args,
        prefill_args=setup.prefill_args,
        decode_args=setup.decode_args,
        one_args=setup.one_args,
        router_args=setup.router_args,
        state_dir=state,
    )
    with Deployment(spec, report=report, cancel=cancel) as deployment:
        engines = Engines({engine.url: engine.role for engine in deployment.engines})
        kv, words = _kv(setup, folder, spec.args_for("decode"), engines)

        def died() -> str:
            return next((process.died("while it was measured").message for process in deployment.dead()), "")

        yield Target(
            url=deployment.router_url,
            model=deployment.model_name(),
            mode=mode,
            engines=engines,
            stories=Stories([deployment.state_dir.story]),
            kv=kv,
            words=words,
            tokenizer=folder,
            died=died,
        )


def _of_router(setup: Setup, mode: Mode, folder: Path | None) -> Target:
    url = setup.router.rstrip("/")
    try:
        listed = get_json(f"{url}/v1/models")["data"]
        health = get_json(f"{url}/health")
    except EngineError as error:
        raise ConfigError(f"--router: {error.message}", hint="is the router running, and ready?") from None
    if not listed:
        raise ConfigError(f"--router: {url} serves no model", hint="its engines are not ready, see its /health")
    told = health.get("engines", []) if isinstance(health, dict) else []
    engines = Engines({engine["url"]: engine["role"] if mode.split else "colocated" for engine in told})
    kv, words = _kv(setup, folder, setup.args, engines)

    def died() -> str:
        try:
            get_json(f"{url}/health")
        except EngineError as error:
            return error.message
        return ""

    stories = Stories(setup.story_dirs)
    return Target(url, str(listed[0]["id"]), mode, engines, stories, kv, words, folder, died)


def _kv(setup: Setup, folder: Path | None, args: Sequence[str], engines: Engines) -> tuple[KvFacts | None, ModelFacts]:
    block_size = setup.block_size or engines.block_size()
    if setup.engine == "sim":
        kv, words = kv_facts.of_profile(setup.profile, args)
    else:
        assert folder is not None
        kv, words = kv_facts.of_model(folder, setup.dtype, args, block_size)
    if setup.kv_bytes is not None:
        kv = KvFacts(setup.kv_bytes, block_size)
    return kv, words
