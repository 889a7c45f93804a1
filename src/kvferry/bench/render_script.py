"""What a model might have said: text with tool calls or reasoning in it, as token ids of the model's own tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kvferry.errors import ConfigError

Parser = Literal["none", "tool", "reasoning"]
PARSERS: tuple[Parser, ...] = ("none", "tool", "reasoning")
MODEL = "bench"

_WORDS = (
    *("river", "boat", "morning", "letter", "engine", "signal", "bridge", "harbour", "window", "garden", "winter"),
    *("the", "a", "of", "and", "to", "in", "that", "with", "under", "across", "before", "carries", "asks", "finds"),
    *("opens", "follows", "counts", "writes", "slowly", "café", "naïve", "12", "2048", "3.14", "first", "never"),
    *("copper", "ladder", "market", "paper", "lantern", "often", "little", "large", "green", "yellow", "returns"),
)
_CITIES = ("Paris", "São Paulo", "Kraków", "Oslo", "Nairobi", "Lima", "Hà Nội", "Porto")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def _json_call(city: str, day: str) -> str:
    call = {"name": "get_weather", "arguments": {"city": city, "day": day}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>\n"


def _xml_call(city: str, day: str) -> str:
    parameters = f"<parameter=city>\n{city}\n</parameter>\n<parameter=day>\n{day}\n</parameter>\n"
    return f"<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>\n"


CALLS: dict[str, Callable[[str, str], str]] = {
    "qwen3_xml": _xml_call,
    "qwen3_coder": _xml_call,
    "qwen3_json": _json_call,
    "hermes": _json_call,
}
"""How a call is written, by vLLM's name of the parser that reads it."""
THINKING = ("qwen3", "deepseek_r1")
"""Reasoning parsers that read `<think>...</think>`."""


class Tokens(Protocol):
    """The model's tokenizer, without special tokens added."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Output ids, exactly as many as asked for, and how many tool calls begin in them."""

    ids: list[int]
    calls: int


def _prose(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(words)).capitalize() + ". "


def script(tokenizer: Tokens, parser: Parser, tool_parser: str, tokens: int, seed: int) -> Script:
    """Raises `ConfigError` for a tool parser whose calls nobody here can write.

    none: prose. tool: a paragraph, then call after call. reasoning: half of it thought, then prose; the last token
    may stand in the middle of a call or a word, as that of an answer cut by max_tokens does.
    """
    if parser == "tool" and tool_parser not in CALLS:
        raise ConfigError(f"--tool-call-parser: {tool_parser!r}", hint=f"expected one of {', '.join(CALLS)}")
    draw = random.Random(seed)
    if parser == "reasoning":
        thought = _text(tokenizer, lambda: _prose(draw, 20), tokens // 2)
        text = f"<think>\n{thought}\n</think>\n\n" + _text(tokenizer, lambda: _prose(draw, 20), tokens)
    elif parser == "tool":
        write = CALLS[tool_parser]
        text = _prose(draw, 30) + "\n"
        text += _text(tokenizer, lambda: write(draw.choice(_CITIES), f"{draw.randrange(1, 29)} May"), tokens)
    else:
        text = _text(tokenizer, lambda: _prose(draw, 20), tokens)
    ids = tokenizer.encode(text)[:tokens]
    return Script(ids=ids, calls=tokenizer.decode(ids).count("<tool_call>"))


def _text(tokenizer: Tokens, piece: Callable[[], str], tokens: int) -> str:
    """Pieces until they are at least so many tokens."""
    parts: list[str] = []
    have = 0
    while have < 1.1 * tokens + 8:  # joined, they may be fewer
        parts.append(piece())
        have += len(tokenizer.encode(parts[-1]))
    return "".join(parts)


def chat(content: str, max_tokens: int, parser: Parser) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return body | ({"tools": TOOLS, "tool_choice": "auto"} if parser == "tool" else {})


def prompt_text(tokenizer: Tokens, tokens: int, seed: int) -> str:
    """About so many tokens; two seeds differ from the first word on, so that no cache helps the second."""
    draw = random.Random(seed)
    text = f"{draw.getrandbits(64):x} " + _text(tokenizer, lambda: _prose(draw, 40), tokens)
    return tokenizer.decode(tokenizer.encode(text)[:tokens])
