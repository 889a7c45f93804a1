"""What a failed leg says: another try, whose fault, whom to avoid."""

from __future__ import annotations

import pytest

from kvferry.errors import (
    CompatError,
    KeyRefused,
    KvMismatch,
    PeerUnreachable,
    PromptMismatch,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvferry.router.engines.faults import AGAIN_STATUS, may_retry, to_avoid, verdict_on
from kvferry.router.replies import LegFailed

PAIR = ("http://p", "http://d")


def own(status: int) -> LegFailed:
    return LegFailed("said so", side="decode", peer="http://d", status=status, body=b"{}")


def landed_not(kind: type, verdict: str = "failed_so") -> LegFailed:
    return LegFailed("no KV", side="decode", peer="http://d", cause=kind("no KV"), verdict=verdict)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 500, 501, 502, 503, 504, 505])
def test_c25_of_an_engines_answers_only_these_are_asked_for_again(status: int) -> None:
    error = own(status)
    assert may_retry(error) == (status in {408, 429, 500, 502, 503, 504}) == (status in AGAIN_STATUS)
    judged = {408: "nothing", 429: "nothing", 501: "nothing"}.get(status, "worked" if status < 500 else "failed")
    assert verdict_on(error) == judged
    assert to_avoid(error, PAIR) == {"http://d"}


def test_an_engine_that_is_gone() -> None:
    refused = LegFailed("refused", side="prefill", peer="http://p", cause=PeerUnreachable("refused"))
    reset = LegFailed("reset", side="prefill", peer="http://p")
    for error in (refused, reset):
        assert may_retry(error) and verdict_on(error) == "failed" and to_avoid(error, PAIR) == {"http://p"}


@pytest.mark.parametrize("kind", [TransferError, TransferRefused, TransferTimeout, KvMismatch, PeerUnreachable])
def test_kv_that_did_not_land_is_tried_on_another_pair(kind: type) -> None:
    error = landed_not(kind)
    assert may_retry(error) and verdict_on(error) == "failed" and to_avoid(error, PAIR) == set(PAIR)


@pytest.mark.parametrize("kind", [CompatError, KeyRefused, PromptMismatch])
def test_what_a_second_try_would_hide(kind: type) -> None:
    error = landed_not(kind)
    assert not may_retry(error) and verdict_on(error) == "nothing"


def test_what_somebody_wanted_to_end_is_not_begun_again() -> None:
    error = landed_not(TransferError, "abandoned")
    assert not may_retry(error) and verdict_on(error) == "nothing"
