"""Bodies for an engine's `/inference/v1/generate`, from what vLLM's frontend would have given its own engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.render import wire

HERE = {"stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
"""Sampling parameters that concern text, which is the session's; and below those that vLLM sets for itself."""
INTERNAL = {"output_kind", "skip_clone", "output_text_buffer_length"}


def sampling_body(params: Any, most_logprobs: int, eos: int | None = None) -> dict[str, Any]:
    """Those set to something else than their default, and `max_tokens`, whose default differs by route.

    `eos`: the tokenizer's end, a stop token to an engine without a tokenizer, and nothing new to another.

    An engine cuts its answer to `logprobs` entries the sampled token included, so one more is asked for where it may
    be, and the kth likeliest is there even when another was sampled.
    """
    body: dict[str, Any] = {}
    for name, default in _fields(type(params)):
        value = getattr(params, name)
        if value is None or (default is None and isinstance(value, list | dict) and not value):
            continue
        if name != "max_tokens" and type(value) is type(default) and value == default:
            continue
        body[name] = plain(value)
    if params.logprobs is not None and params.logprobs > 0 and not 0 <= most_logprobs <= params.logprobs:
        body["logprobs"] = params.logprobs + 1
    if eos is not None and eos not in (stops := body.get("stop_token_ids", [])):
        body["stop_token_ids"] = [*stops, eos]
    body["detokenize"] = False
    return body


_known: dict[type, list[tuple[str, Any]]] = {}


def _fields(kind: type) -> list[tuple[str, Any]]:
    """(name, default) of what a request may set; looked up once per class."""
    if kind in _known:
        return _known[kind]
    left_out = HERE | INTERNAL
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in left_out]
    _known[kind] = [(field.name, field.default) for field in fields if not field.name.startswith("_")]
    return _known[kind]


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {name: one for name, one in fields.items() if not name.startswith("_") and one is not None}
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def generate_body(
    request_id: str,
    token_ids: list[int],
    sampling: Mapping[str, Any],
    *,
    model: str,
    priority: int,
    others: Mapping[str, Any],
) -> bytes:
    """`others`: members that are left out where they are None."""
    body: dict[str, Any] = {
        "request_id": request_id,
        "model": model,
        "token_ids": token_ids,
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if priority:
        body["priority"] = priority
    body.update({name: value for name, value in others.items() if value is not None})
    return wire.encode(body)
