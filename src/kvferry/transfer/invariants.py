"""What must be true of a transfer core at any time, and what of an idle one. Raises; changes nothing.

Core's thread, or with the core at rest. Tests call it at the end of each; with `debug_invariants` a core calls it
itself whenever it has nothing open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import InvariantBroken
from kvferry.protocol.consistency import inconsistencies, left_over
from kvferry.transfer.peers import Stage

if TYPE_CHECKING:
    from kvferry.transfer.core import TransferCore


def check_invariants(core: TransferCore, *, idle: bool) -> None:
    """`idle`: nothing is open, so nothing may be left of what was. Raises `InvariantBroken` with all that is wrong."""
    found = [*_peers(core), *inconsistencies(core._rendezvous), *inconsistencies(core._landings)]
    if idle:
        found += _left_over(core)
    if found:
        raise InvariantBroken(f"{core.identity.engine_id} rank {core.identity.rank}: {'; '.join(found)}")


def check_when_idle(core: TransferCore) -> None:
    """With nothing open and no request of the engine's known: `check_invariants`."""
    if (
        not core._requests
        and not core.busy()
        and not any(n for what, n in core.open_counts().items() if what != "peers")
    ):
        check_invariants(core, idle=True)


def _peers(core: TransferCore) -> list[str]:
    out = []
    for post in core._posts.open():
        if post.peer.key not in core._peers.by_key:
            out.append(f"a {post.op} is in flight to {post.peer.key}, which is no peer")
    for key, peer in core._peers.by_key.items():
        if key != peer.key:
            out.append(f"peer {peer.key} is kept under {key}")
        if peer.stage is Stage.UP and (peer.warm_handle is not None or not peer.agent):
            out.append(f"peer {key} is up without an agent, or its first access is not over")
    return out


def _left_over(core: TransferCore) -> list[str]:
    counts = {what: n for what, n in core.open_counts().items() if n and what != "peers"}
    out = [f"{n} {what} are open" for what, n in counts.items()]
    for what, left in (
        ("requests", core._requests),
        ("moments", core._waiting_moments),
        ("failures that were told", core.stats.doomed_requests()),
    ):
        if left:
            out.append(f"{what} are left: {list(left)[:5]}")
    return [*out, *left_over(core._rendezvous), *left_over(core._landings)]
