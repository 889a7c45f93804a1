"""What engines and stories tell of a run: prompt tokens by where their KV came from, bytes moved, time that it cost."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import EngineError
from kvferry.launch.web import open_json

SETTLE_S = 5.0
"""An engine's metrics follow its last step by moments; longer than this, and they will not come."""


def engine_metrics(url: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample; none of a server that does not answer."""
    try:
        with open_json(f"{url}/metrics", timeout_s=10.0) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException, EngineError):
        return []
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


@dataclass(frozen=True)
class Count:
    """Of one engine, since it started. None: it does not count that."""

    sources: Mapping[str, float] = field(default_factory=dict)
    """Prompt tokens by source (vLLM's `prompt_tokens_by_source`); empty if it tells none."""
    nixl_bytes: float | None = None
    """By vLLM's NIXL connectors and ours, on the side that posts."""
    late_s: float | None = None
    block_size: int | None = None


def count(url: str) -> Count:
    sources: dict[str, float] = {}
    nixl: float | None = None
    late: float | None = None
    block_size: int | None = None
    for name, labels, value in engine_metrics(url):
        if name == "vllm:prompt_tokens_by_source_total":
            sources[labels.get("source", "")] = sources.get(labels.get("source", ""), 0.0) + value
        elif name == "vllm:nixl_bytes_transferred_sum":
            nixl = (nixl or 0.0) + value
        elif name == "kvferry_engine_late_seconds_total":
            late = (late or 0.0) + value
        elif name.startswith("vllm:cache_config_info") and labels.get("block_size", "").isdigit():
            block_size = int(labels["block_size"])
    return Count(sources, nixl, late, block_size)


@dataclass(frozen=True)
class Told:
    """What the engines counted between two moments. `by_role`: role -> source -> prompt tokens. `late_s`: engine ->
    time that it overran its model. None: nothing tells.
    """

    by_role: Mapping[str, Mapping[str, float]]
    nixl_bytes: float | None
    late_s: Mapping[str, float]

    def tokens(self, role: str, source: str) -> float | None:
        return self.by_role[role].get(source, 0.0) if self.by_role.get(role) else None

    @property
    def cache_hits(self) -> float:
        return sum(sources.get("local_cache_hit", 0.0) for sources in self.by_role.values())


class Engines:
    """The engines of one target: URL -> role ('prefill', 'decode', 'colocated')."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self.roles = dict(roles)

    def now(self) -> dict[str, Count]:
        return {url: count(url) for url in self.roles}

    def block_size(self) -> int | None:
        """Tokens per block of those that end requests; None where they don't tell or don't agree."""
        told = {count.block_size for url, count in self.now().items() if self.roles[url] != "prefill"} - {None}
        return told.pop() if len(told) == 1 else None

    def since(self, before: Mapping[str, Count], prompt_tokens: int, nixl_bytes: int = 0) -> Told:
        """Waits, at most `SETTLE_S`, until the engines that end requests have counted so many prompt tokens, and those
        that count NIXL's bytes so many of them: their metrics follow their last step by moments.
        """
        until = time.monotonic() + SETTLE_S
        while True:
            told = self._less(before, self.now())
            ends = [told.by_role.get(role, {}) for role in ("decode", "colocated")]
            counted = [sum(sources.values()) for sources in ends if sources]
            computed = not counted or sum(counted) >= prompt_tokens
            moved = told.nixl_bytes is None or told.nixl_bytes >= nixl_bytes
            if (computed and moved) or time.monotonic() > until:
                return told
            time.sleep(0.2)

    def _less(self, before: Mapping[str, Count], after: Mapping[str, Count]) -> Told:
        by_role: dict[str, dict[str, float]] = {}
        nixl: float | None = None
        late: dict[str, float] = {}
        for url, role in self.roles.items():
            old, new = before.get(url, Count()), after[url]
            for source, value in new.sources.items():
                sources = by_role.setdefault(role, {})
                sources[source] = sources.get(source, 0.0) + value - old.sources.get(source, 0.0)
            if new.nixl_bytes is not None:
                nixl = (nixl or 0.0) + new.nixl_bytes - (old.nixl_bytes or 0.0)
            if new.late_s is not None:
                late[f"{role} {url}"] = new.late_s - (old.late_s or 0.0)
        return Told(by_role, nixl, late)


@dataclass
class Transfer:
    """One transfer, by its story. Times on the wall clock of whoever told; None: not told. `hooks_ms`: side -> time of
    our hooks on its engine thread.
    """

    moved_bytes: int = 0
    descriptors: int = 0
    posts: int = 0
    computed: float | None = None
    landed: float | None = None
    hooks_ms: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_ms(self) -> float | None:
        """From the end of prefill on its last rank to everything landed at decode."""
        if self.computed is None or self.landed is None:
            return None
        return (self.landed - self.computed) * 1e3


class Stories:
    """Reads story folders as they grow: each line once. `transfers` by transfer id, `requests` by X-Request-Id."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._read: dict[Path, int] = {}
        self.transfers: dict[str, Transfer] = {}
        self.requests: dict[str, str] = {}

    @property
    def told(self) -> bool:
        """Whether engines told of transfers; a router's stories alone don't say what moved."""
        return any(transfer.posts for transfer in self.transfers.values())

    def update(self) -> None:
        for folder in self._folders:
            for path in sorted(folder.glob("*.jsonl")):
                self._more(path)

    def _more(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for raw in whole.splitlines():
            self._take(json.loads(raw))

    def _take(self, line: Mapping[str, Any]) -> None:
        transfer = self.transfers.setdefault(line["transfer_id"], Transfer())
        event, t = line["event"], float(line["t"])
        if event == "posted":
            transfer.moved_bytes += int(line["nbytes"])
            transfer.descriptors += int(line["descriptors"])
            transfer.posts += 1
        elif event == "computed":
            transfer.computed = max(t, transfer.computed or t)
        elif event == "landed":
            transfer.landed = max(t, transfer.landed or t)
        elif event == "hooks":
            side = str(line["side"])
            transfer.hooks_ms[side] = transfer.hooks_ms.get(side, 0.0) + float(line["ms"])
        elif event == "received" and line.get("request_id"):
            self.requests[str(line["request_id"])] = line["transfer_id"]
