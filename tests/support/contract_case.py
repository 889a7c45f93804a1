"""One request that one engine and a pair must answer alike, or a documented difference; see `contract_cases.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GENERATE = "/inference/v1/generate"
JSON = "application/json"
ADAPTER = "porter"
"""A LoRA adapter that the engines of the vllm tier serve beside the model."""
MODEL = "<model>"
"""Stands for the name that the engines serve."""

USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
PASSAGE = "The ferry left the east bank at dawn with bread, milk and letters. "
LONG = PASSAGE * 8
TOOL = {
    "type": "function",
    "function": {
        "name": "depart",
        "description": "When a ferry leaves.",
        "parameters": {
            "type": "object",
            "properties": {"bank": {"type": "string", "enum": ["east", "west"]}},
            "required": ["bank"],
            "additionalProperties": False,
        },
    },
}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
NAMED = {"type": "function", "function": {"name": "depart"}}
SCHEMA = {
    "type": "object",
    "properties": {"bank": {"type": "string", "enum": ["east", "west"]}, "full": {"type": "boolean"}},
    "required": ["bank", "full"],
    "additionalProperties": False,
}
IMAGE = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]


@dataclass(frozen=True, kw_only=True)
class Differs:
    """`status` and `param`: of the pair's refusal. `fields`: paths in the reply that differ, all else is equal."""

    why: str
    status: int = 0
    param: str | None = None
    fields: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """`times`: sent so often, one after the other, all replies compared. `greedy`: temperature 0 is added. `status`: of
    one engine, checked so that a case shows what it says. `tiers`: which engines know the feature.
    """

    name: str
    route: str = COMPLETIONS
    method: str = "POST"
    body: Any = None
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    times: int = 1
    greedy: bool = True
    differs: Differs | None = None
    rendered: Differs | None = None
    """How a pair behind a render tier differs, where that without one is equal."""
    tiers: Sequence[str] = ("sim",)

    def payload(self, model: str) -> tuple[bytes | None, dict[str, str]]:
        """The bytes to send, and their headers."""
        if self.raw is not None:
            return self.raw, {"Content-Type": JSON} | self.headers
        if self.body is None:
            return None, self.headers
        body = self.body
        if isinstance(body, dict):
            body = {"model": model} | body
            if body["model"] is None:
                del body["model"]
            if self.greedy and self.route in (COMPLETIONS, CHAT, RESPONSES):
                body.setdefault("temperature", 0)
            if self.greedy and self.route == GENERATE and isinstance(body.get("sampling_params"), dict):
                body["sampling_params"] = {"temperature": 0} | body["sampling_params"]
        return json.dumps(body).encode(), {"Content-Type": JSON} | self.headers


BOTH = ("sim", "vllm")
VLLM = ("vllm",)


def text(name: str, prompt: Any = None, **more: Any) -> dict[str, Any]:
    """A completion whose prompt no other case has."""
    return {"prompt": f"{name}. {LONG}" if prompt is None else prompt, "max_tokens": 12} | more


def chat(name: str, content: Any = None, **more: Any) -> dict[str, Any]:
    said = f"{name}. {LONG} What left at dawn?" if content is None else content
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": said}]
    return {"messages": messages, "max_tokens": 12} | more


def ids(start: int, count: int = 40) -> list[int]:
    return [300 + (start * 977 + at * 131) % 20_000 for at in range(count)]


def completion(name: str, *, tiers: Sequence[str] = ("sim",), status: int = 200, **body: Any) -> Case:
    return Case(name=name, body=text(name, **body), tiers=tiers, status=status)


def talk(name: str, *, tiers: Sequence[str] = ("sim",), status: int = 200, **body: Any) -> Case:
    return Case(name=name, route=CHAT, body=chat(name, **body), tiers=tiers, status=status)


def respond(name: str, *, tiers: Sequence[str] = ("sim",), status: int = 200, **body: Any) -> Case:
    body = {"input": f"{name}. {PASSAGE} What left?", "max_output_tokens": 10} | body
    return Case(name=name, route=RESPONSES, body=body, tiers=tiers, status=status)


def tokens(
    name: str, at: int, sampling: Any, *, tiers: Sequence[str] = ("sim",), status: int = 200, **body: Any
) -> Case:
    body = {"token_ids": ids(at), "sampling_params": sampling} | body
    return Case(name=name, route=GENERATE, body=body, tiers=tiers, status=status)


def wrong(name: str, route: str = COMPLETIONS, *, status: int = 400, tiers: Sequence[str] = BOTH, **body: Any) -> Case:
    made = text(name) if route == COMPLETIONS else chat(name)
    return Case(name=name, route=route, body=made | body, status=status, tiers=tiers)
