"""Blocks that can't go back because a silent peer may still write to them: how many are too many. Core's thread."""

from __future__ import annotations

from kvferry.protocol.landing import Landings
from kvferry.transfer.peers import Peers, Stage

CODE = "quarantine_full"


def overfull(peers: Peers, landings: Landings, share: float, num_blocks: int) -> tuple[str, str] | None:
    """(key of the peer to cut off, why), if silent peers hold up more than `share` of our `num_blocks`.

    One that is heard of answers soon. One that was stopped listens before it goes on writing (`TransferCore.step`), and
    so finds that it was cut off; what the network had of its WRITEs arrives while the landing settles.
    """
    silent = {key for key, peer in peers.by_key.items() if peer.stage is Stage.SILENT}
    if not silent:
        return None
    held = {key: blocks for key, blocks in landings.held_by_writers().items() if key in silent}
    total, most = sum(held.values()), int(share * num_blocks)
    if total <= most:
        return None
    key = max(held, key=lambda one: held[one])
    reason = f"{total} of {num_blocks} blocks wait for peers that are silent, at most {most} may: this one has {held[key]}"
    return key, reason
