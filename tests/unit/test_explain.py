"""Why a transfer failed on D: every rank is asked."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import PeerUnreachable
from kvferry.ids import TransferId
from kvferry.protocol.messages import Verdict
from kvferry.router.dispatch import explain
from kvferry.router.replies import LegFailed

T = TransferId("t")
ERROR = LegFailed("decode engine answered 500", side="decode", peer="http://d")


def decode(ranks: int | None) -> Any:
    about = None if ranks is None else SimpleNamespace(tp_size=ranks)
    spec = SimpleNamespace(side_host="d")
    return SimpleNamespace(spec=spec, url="http://d", key=None, description=about, side_port=lambda dp: 5600 + 4 * dp)


async def why(monkeypatch: pytest.MonkeyPatch, said: dict[int, Any], ranks: int | None, dp: int = 0) -> tuple[Any, set]:
    """`said`: port -> (seconds until it answers, (state, code, reason) or an error)."""
    asked = set()

    async def answer(host: str, port: int, transfer_id: str, timeout_s: float, key: object) -> Verdict:
        asked.add(port)
        after, what = said[port]
        await asyncio.sleep(after)
        if isinstance(what, Exception):
            raise what
        state, code, reason = what
        return Verdict(transfer_id=T, state=state, code=code, reason=reason)

    monkeypatch.setattr(explain.inquiry, "why", answer)
    told = await explain.why(decode(ranks), None, T, ERROR, dp)
    assert len(asyncio.all_tasks()) == 1, "a question is left"
    return told, asked


OK, OPEN = ("ok", "", ""), ("open", "", "")
CANCELLED, GONE = ("failed", "cancelled", "aborted"), ("failed", "peer_gone", "P is gone")
DEAD = PeerUnreachable("no answer")


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ((OK, OK, OK, GONE), "peer_gone"),
        ((CANCELLED, OK, GONE, CANCELLED), "peer_gone"),
        ((CANCELLED, OK, OK, OK), "cancelled"),
        ((DEAD, OPEN, GONE, DEAD), "peer_gone"),
        ((OK, OK, OPEN, DEAD), ""),
    ],
)
async def test_any_rank_may_know(said: tuple, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {5604 + rank: (0.0, what) for rank, what in enumerate(said)}
    told, asked = await why(monkeypatch, answers, 4, dp=1)
    assert asked == {5604, 5605, 5606, 5607}
    assert (
        told is ERROR if not verdict else ((told.verdict == verdict and GONE[2] in str(told)) or verdict == "cancelled")
    )


async def test_who_knows_it_need_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    told, _ = await why(monkeypatch, {5600: (30.0, OK), 5601: (0.0, GONE)}, 2)
    assert told.verdict == "peer_gone" and time.monotonic() - began < 5.0


async def test_an_engine_that_was_never_described_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told, asked = await why(monkeypatch, {5600: (0.0, GONE)}, None)
    assert told.verdict == "peer_gone" and asked == {5600}
