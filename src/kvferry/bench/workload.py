"""What is sent and when: prompts of random token ids, and send times. Everything follows from the seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError
from kvferry.launch.spec import arg_value

Arrival = Literal["poisson", "constant"]
Prompts = Literal["text", "ids"]
_DTYPE_BYTES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """`token_ids`: all but the special ones. `kv_bytes`: of one token, all layers, all `kv_heads`."""

    token_ids: npt.NDArray[np.int64]
    kv_bytes: int
    kv_heads: int = 1


def model_facts(folder: Path, dtype: str, vllm_args: Sequence[str] = ()) -> ModelFacts:
    """From the files of a model in Hugging Face format. Raises `ConfigError` for one whose KV is not plain K and V."""
    config = _json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    if "kv_lora_rank" in config or "num_hidden_layers" not in config:
        raise ConfigError(f"model {folder}: its KV size is not known here", hint="models with plain K and V per layer")
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    # K and V of each layer: vLLM's AttentionSpec.page_size_bytes divided by its block size.
    kv_bytes = 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * _element_bytes(dtype, vllm_args)
    special = _special_ids(folder, config)
    ids = np.array([i for i in range(int(config["vocab_size"])) if i not in special])
    return ModelFacts(ids, kv_bytes, kv_heads)


def _element_bytes(dtype: str, vllm_args: Sequence[str]) -> int:
    cache = arg_value(vllm_args, "--kv-cache-dtype") or "auto"
    if cache.startswith("fp8"):
        return 1
    name = dtype if cache == "auto" else cache
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r}: its size is not known here", hint=f"one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _special_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        value = config.get(name)
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    if (folder / "tokenizer.json").exists():
        found |= {int(token["id"]) for token in _json(folder / "tokenizer.json").get("added_tokens", [])}
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return facts if isinstance(facts, dict) else {}


def prompt(facts: ModelFacts, seed: int, input_len: int, index: int) -> list[int]:
    """Prompt `index`: exactly `input_len` ids. Two of them share no whole block, so no prefix cache can serve one."""
    random = np.random.default_rng([seed, input_len, index])
    return [int(token) for token in random.choice(facts.token_ids, input_len)]


def send_times(count: int, qps: float, arrival: Arrival, seed: int) -> list[float]:
    """Seconds after the start at which each request is due. Poisson: independent exponential gaps, stretched so that
    their mean is 1/qps to the last digit: of 100 gaps as drawn it is off by 10%, and so would be the rate that a result
    is named by.
    """
    if count < 2:
        return [0.0] * count
    gaps = np.full(count - 1, 1 / qps)
    if arrival == "poisson":
        drawn = np.random.default_rng([seed, count]).exponential(1.0, count - 1)
        gaps = drawn / drawn.mean() / qps
    return [0.0, *(float(due) for due in np.cumsum(gaps))]
