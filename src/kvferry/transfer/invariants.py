"""What must be true of a transfer core at any time, and what of an idle one. Raises; changes nothing.

Core's thread, or with the core at rest. Tests call it at the end of each; with `debug_invariants` a core calls it
itself whenever it has nothing open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.transfer.peers import Stage

if TYPE_CHECKING:
    from kvferry.transfer.core import TransferCore


class InvariantBroken(KVFerryError):
    code = "invariant_broken"


def check_invariants(core: TransferCore, *, idle: bool) -> None:
    """`idle`: nothing is open, so nothing may be left of what was. Raises `InvariantBroken` with all that is wrong."""
    found = [*_blocks(core), *_peers(core), *core._rendezvous.inconsistencies(), *core._landings.inconsistencies()]
    if idle:
        found += _left_over(core)
    if found:
        raise InvariantBroken(f"{core.identity.engine_id} rank {core.identity.rank}: {'; '.join(found)}")


def _blocks(core: TransferCore) -> list[str]:
    """No block of ours is written to for two requests."""
    owner: dict[int, str] = {}
    out = []
    taken = core._landings.blocks() + [(one.land.request, one.land.block_ids) for one in core._openings.values()]
    for request, block_ids in taken:
        for block in block_ids:
            if owner.setdefault(block, request) != request:
                out.append(f"block {block} is the destination of {owner[block]!r} and of {request!r}")
    return out


def _peers(core: TransferCore) -> list[str]:
    out = []
    for post in core._posts.open():
        if post.peer not in core._peers.by_key:
            out.append(f"a {post.op} is in flight to {post.peer}, which is no peer")
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
    return [*out, *core._rendezvous.left_over(), *core._landings.left_over()]
