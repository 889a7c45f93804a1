"""What a failed leg says: whether another try may help, whose fault it was, which engines to avoid. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvferry.errors import (
    EngineError,
    FabricError,
    KvMismatch,
    PeerUnreachable,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvferry.router.replies import LegFailed

AGAIN_STATUS = frozenset((408, 429, 500, 502, 503, 504))
"""Of an engine's own answer. Any other says something of the request, and would be said again."""
AGAIN_CODES = frozenset(
    kind.code
    for kind in (
        PeerUnreachable,
        EngineError,
        FabricError,
        TransferError,
        TransferRefused,
        TransferTimeout,
        KvMismatch,
    )
)
"""Where the engine had no answer: it could not be reached, broke off, or the KV did not land. Not among them: a wrong
key, engines that don't fit together, and prompts that differ, which a second try would only hide."""
NOT_AGAIN = frozenset(("abandoned",))
"""How the transfer ended, in D's words: somebody wanted it to end."""

Verdict = Literal["worked", "failed", "nothing"]


def may_retry(error: LegFailed) -> bool:
    """Whether the same request may succeed elsewhere, or a moment later."""
    if error.own_status:
        return error.own_status in AGAIN_STATUS
    return error.code in AGAIN_CODES and error.verdict not in NOT_AGAIN


def verdict_on(error: LegFailed) -> Verdict:
    """On the engine whose leg it was: an error that the request deserved is a good answer; being busy is no fault."""
    if error.own_status in (408, 429, 501):
        return "nothing"
    if error.own_status:
        return "worked" if error.own_status < 500 else "failed"
    return "failed" if may_retry(error) else "nothing"


def is_of_transfer(error: LegFailed) -> bool:
    """The KV did not land: which of the two engines is to blame, only many such can tell."""
    return not error.own_status and bool(error.verdict) and error.code in AGAIN_CODES


def to_avoid(error: LegFailed, urls: Iterable[str]) -> frozenset[str]:
    """`urls`: of the pair. The next try takes others, where there are any."""
    return frozenset(urls) if is_of_transfer(error) else frozenset((error.peer,))
