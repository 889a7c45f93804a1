"""One request inside the engine, and what leaves it: the only things that the server and the engine loop share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from kvferry.engine.content import U64, prefixes

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Sampling:
    """What ends a request. `max_tokens` counts output tokens and is at least 1; the server has cut it to what fits
    the longest model length. `stop_token_ids` end it as 'stop' and are part of the output."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0


class Status(StrEnum):
    WAITING = "WAITING"
    WAITING_FOR_REMOTE_KVS = "WAITING_FOR_REMOTE_KVS"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_STOPPED = "FINISHED_STOPPED"
    FINISHED_LENGTH_CAPPED = "FINISHED_LENGTH_CAPPED"
    FINISHED_ABORTED = "FINISHED_ABORTED"
    FINISHED_ERROR = "FINISHED_ERROR"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(eq=False)
class Request:
    """Made by the server, then owned by the engine thread. The connector reads `request_id`, `num_prompt_tokens`,
    `prompt_token_ids`, `num_computed_tokens`, `max_tokens`, `status` and `kv_transfer_params`, under vLLM's names.

    `prompt`: token ids, at least one. `token_ids`: prompt and output. `num_computed_tokens`: how many of them have
    their KV in `block_ids`.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    kv_transfer_params: Mapping[str, Any] | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    _prefix: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    _tail: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    def hash_tokens(self) -> None:
        """(Re)compute `content.prefixes` of all tokens; later ones follow through `append`."""
        self._prefix, self._tail = prefixes(self.token_ids), []

    def append(self, token: int, prefix: int) -> None:
        self.token_ids.append(token)
        self._tail.append(prefix)

    def prefix_at(self, position: int) -> int:
        known = len(self._prefix)
        return int(self._prefix[position]) if position < known else self._tail[position - known]

    def prefixes_of(self, start: int, end: int) -> U64:
        if end <= len(self._prefix):
            return self._prefix[start:end]
        return np.array([self.prefix_at(position) for position in range(start, end)], dtype=np.uint64)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.prompt

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request. `finish_reason` None: more will come. `num_cached_tokens`: prompt tokens found
    in the prefix cache. `kv_transfer_params`: with the last output only. `error`: with 'error' only, one line."""

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    error: str = ""
