"""What one request and one slice of a run gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.kv import KvFacts
from kvferry.bench.stats import Summary, summary
from kvferry.errors import KVFerryError


class VoidRun(KVFerryError):
    """What was measured is not what was meant to be."""

    code = "void_run"


@dataclass
class Sample:
    """One request, as its client saw it. Times in milliseconds, counted from when it was due."""

    index: int
    input_len: int
    transfer_id: str = ""
    lag_ms: float = 0.0
    """How late it was sent."""
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    """Gaps between events that carry tokens."""
    first_tokens: int = 0
    """Tokens in the first of those events."""
    tokens: int = 0
    text: str = ""
    error: str = ""
    moved_bytes: int | None = None
    """By the story; None where the mode tells none."""
    hooks_ms: dict[str, float] = field(default_factory=dict)
    """Side -> time of our hooks on its engine thread."""
    sent_s: float = 0.0
    """When it was sent, on the client's clock."""
    prompt_tokens: int | None = None
    """By the server's count; None where it told none."""

    @property
    def tpot_ms(self) -> float | None:
        """(last token - first token) / tokens after the first event; None if there are none."""
        after = self.tokens - self.first_tokens
        return sum(self.itl_ms) / after if after > 0 else None

    def facts(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "transfer_id": self.transfer_id,
            "lag_ms": round(self.lag_ms, 3),
            "ttft_ms": round(self.ttft_ms, 3),
            "tpot_ms": None if self.tpot_ms is None else round(self.tpot_ms, 3),
            "e2e_ms": round(self.e2e_ms, 3),
            "itl_ms": [round(gap, 3) for gap in self.itl_ms],
            "tokens": self.tokens,
            "moved_bytes": self.moved_bytes,
            "hooks_ms": {side: round(ms, 4) for side, ms in self.hooks_ms.items()},
            "text": self.text,
        }


@dataclass(frozen=True)
class Variant:
    """A mode of an engine, tuned for few cores or as vLLM ships it."""

    mode: str
    tuned: bool = True
    engine: str = "vllm"

    @property
    def label(self) -> str:
        return self.mode if self.tuned else f"{self.mode} as shipped"


@dataclass
class Batch:
    """The requests of one prompt length in one start of a deployment. `first`: right after it was ready, on its own.
    `moved_bytes`: of `samples`, by the engines' metrics or the story; None where nothing tells.
    """

    variant: Variant
    input_len: int
    round: int
    samples: list[Sample]
    first: Sample | None = None
    moved_bytes: int | None = None


def result(batches: Sequence[Batch], output_tokens: int, qps: float | None, kv_bytes: int) -> dict[str, Any]:
    """One entry of `results`: all batches of one variant and prompt length. Whole blocks move, so `moved_bytes` may be
    more than `expected_bytes`.
    """
    variant, input_len = batches[0].variant, batches[0].input_len
    samples = [sample for batch in batches for sample in batch.samples]
    firsts = [batch.first for batch in batches if batch.first is not None]
    ttft = summary([sample.ttft_ms for sample in samples])
    colocated = variant.mode == "colocated"
    known = [batch.moved_bytes for batch in batches if batch.moved_bytes is not None]
    entry: dict[str, Any] = {
        "mode": variant.mode,
        "engine": variant.engine,
        "tuned": variant.tuned,
        "input_len": input_len,
        "output_tokens": output_tokens,
        "qps": qps,
        "num": len(samples),
        "starts": len(batches),
        "ttft_ms": ttft,
        "tpot_ms": summary([sample.tpot_ms for sample in samples if sample.tpot_ms is not None]),
        "itl_ms": summary([gap for sample in samples for gap in sample.itl_ms]),
        "e2e_ms": summary([sample.e2e_ms for sample in samples]),
        "lag_ms": summary([sample.lag_ms for sample in samples]),
        "first_ttft_ms": summary([sample.ttft_ms for sample in firsts]),
        "later_ttft_p50_ms": ttft["p50"],
        "moved_bytes": sum(known) if len(known) == len(batches) else None,
        "expected_bytes": 0 if colocated else KvFacts(kv_bytes, None).needed(input_len) * len(samples),
        "hooks_ms": hooks(samples),
        "samples": [{"round": batch.round, **sample.facts()} for batch in batches for sample in batch.samples],
        "first_samples": [{"round": b.round, **b.first.facts()} for b in batches if b.first is not None],
    }
    return entry


def hooks(samples: Sequence[Sample]) -> dict[str, Summary] | None:
    """Per side of our connector; None where it did not run."""
    sides = sorted({side for sample in samples for side in sample.hooks_ms}, reverse=True)
    return {side: summary([s.hooks_ms.get(side, 0.0) for s in samples], 4) for side in sides} or None
