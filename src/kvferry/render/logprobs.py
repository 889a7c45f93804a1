"""Logprobs of the wire back in the rows that an engine core gives: the sampled token first, then the k likeliest by
rank, the sampled one among them a second time. vLLM's frontend numbers ranks by these columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.render.wire import LogProb, Position, PromptLogProb


class Row(NamedTuple):
    """`ids` and `logprobs`: [1 + k], or shorter if fewer are known. `rank`: the first one's, 0 unknown."""

    ids: list[int]
    logprobs: list[float]
    rank: int


def sample_row(position: Position, k: int) -> Row:
    """`k` as in `SamplingParams.logprobs`, -1 for the whole vocabulary."""
    ranked = by_rank(position.top_logprobs, k)
    ids = [position.token_id, *(one.token_id for one in ranked)]
    return Row(ids, [position.logprob, *(one.logprob for one in ranked)], position.rank or 0)


def by_rank(top: Sequence[LogProb], k: int) -> list[LogProb]:
    """Those of rank 1 to k, in order, up to the first that is missing."""
    found = sorted((one for one in top if one.rank and (k == -1 or one.rank <= k)), key=lambda one: one.rank or 0)
    return [one for expected, one in enumerate(found, start=1) if one.rank == expected]


def prompt_rows(prompt: Sequence[dict[str, PromptLogProb] | None]) -> list[Row]:
    """Of vLLM's `prompt_logprobs`: one row per token but the first, all equally long: one whose token is not among the
    likeliest has an entry more, so shorter ones are filled up by what stands in them already.
    """
    rows = []
    for entry in prompt:
        if not entry:
            continue
        (first, own), *_ = entry.items()
        top = [LogProb(int(token), one.logprob, one.rank) for token, one in entry.items()]
        ranked = by_rank(top, -1)
        ids = [int(first), *(one.token_id for one in ranked)]
        rows.append(Row(ids, [own.logprob, *(one.logprob for one in ranked)], own.rank or 0))
    width = max((len(row.ids) for row in rows), default=0)
    for row in rows:
        missing = width - len(row.ids)
        row.ids.extend(row.ids[-1:] * missing)
        row.logprobs.extend(row.logprobs[-1:] * missing)
    return rows
