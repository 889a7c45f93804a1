"""What a load generator is asked and what it gives back, whichever it is; and which one to take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvferry.bench.mix import Kind
from kvferry.bench.records import Sample
from kvferry.bench.workload import Arrival, ModelFacts, Prompts
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.cancel import Cancel

NAMES = ("vllm", "aiperf", "builtin")
AUTO = "auto"


@dataclass(frozen=True)
class Job:
    """One run of one point. `url`, `model`: where, and the name served there. `words`: token ids to make prompts of.
    `tokenizer`: folder of the server's tokenizer, where one is known. `prompts`: how they are sent, by a generator that
    knows both. `log`: file for what the generator says.
    """

    url: str
    model: str
    words: ModelFacts
    tokenizer: Path | None
    input_len: int
    output_len: int
    qps: float
    num: int
    arrival: Arrival
    prompts: Prompts
    seed: int
    warm_ups: int
    timeout_s: float
    log: Path
    kind: Kind = "random"
    """`mixed`: prompts of several lengths, about `input_len`, that share beginnings (`mix.py`)."""


@dataclass
class LoadRun:
    """Samples in the order of sending. `duration_s`: from the first one due to the last token. `starts_s`: when each
    left, after the first. `warm_ups`: those answered well. `lag_source`: how `Sample.lag_ms` is known, "" if it is not.
    `request_ids`: the X-Request-Id of each, where the generator sends one. `raw`: the generator's own result.
    """

    samples: list[Sample]
    duration_s: float
    starts_s: list[float]
    warm_ups: int
    lag_source: str
    command: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    raw: dict[str, Any] | None = None
    broken: str = ""
    """Why the generator gave no result at all."""


class Load(Protocol):
    """`overhead_s`: what a call takes beside the requests. `texts`: can send texts, for which server and generator must
    have the same tokenizer. `tokenizer`: opens one in any case.
    """

    name: str
    overhead_s: float
    texts: bool
    tokenizer: bool

    def version(self) -> str: ...
    def run(self, job: Job, cancel: Cancel, progress: Callable[[str], None]) -> LoadRun:
        """Raises `Stopped`; nothing is left running then."""


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose(name: str) -> Load:
    """`auto`: vLLM's where vLLM is installed, else aiperf. Raises `ConfigError`."""
    if name not in (AUTO, *NAMES):
        raise unknown_name("load", name, (AUTO, *NAMES))
    if name == AUTO:
        name = next((package for package in ("vllm", "aiperf") if _installed(package)), "")
        if not name:
            raise ConfigError(
                "no load generator is installed",
                hint="pip install 'kvferry[load]', or --load builtin for this project's own",
            )
    if name != "builtin" and not _installed(name):
        hint = "pip install 'kvferry[load]'" if name == "aiperf" else "it comes with vLLM; or --load builtin"
        raise ConfigError(f"load: {name} is not installed", hint=hint)
    if name == "vllm":
        from kvferry.bench.load_vllm import VllmLoad

        return VllmLoad()
    if name == "aiperf":
        from kvferry.bench.load_aiperf import AiperfLoad

        return AiperfLoad()
    from kvferry.bench.load_builtin import BuiltinLoad

    return BuiltinLoad()
