"""What a client has been told by streamed chat chunks, so that two servers' words can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """Of one delta. `calls`: (index, name or '', arguments) of each; ids are random, so they are left out."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[int, str, str], ...] = ()
    finish: str = ""


def piece_of(chunk: Mapping[str, Any]) -> Piece:
    """Of one chat.completion.chunk with one choice, or none."""
    if not chunk["choices"]:
        return Piece()
    choice = chunk["choices"][0]
    delta = choice["delta"]
    calls = tuple(
        (call["index"], (call["function"] or {}).get("name") or "", (call["function"] or {}).get("arguments") or "")
        for call in delta.get("tool_calls") or ()
    )
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return Piece(delta.get("content") or "", reasoning, calls, choice.get("finish_reason") or "")


def pieces_of(events: bytes) -> list[Piece]:
    """Of whole SSE events; `[DONE]` is none."""
    lines = [line[6:] for line in events.decode().split("\n") if line.startswith("data: ")]
    return [piece_of(json.loads(line)) for line in lines if line != "[DONE]"]


class Said(msgspec.Struct, frozen=True):
    """All of it, put together. `calls`: (name, arguments) in order. `finish` is kept apart: of an answer that was cut
    vLLM's stateless endpoint says 'tool_calls' where `vllm serve` says 'length'.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def joined(pieces: Iterable[Piece]) -> Said:
    content, reasoning = [], []
    calls: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        content.append(piece.content)
        reasoning.append(piece.reasoning)
        for index, name, arguments in piece.calls:
            known = calls.get(index, ("", ""))
            calls[index] = (known[0] + name, known[1] + arguments)
    return Said("".join(content), "".join(reasoning), tuple(calls[index] for index in sorted(calls)))


def finish_of(pieces: Iterable[Piece]) -> str:
    return next((piece.finish for piece in pieces if piece.finish), "")
