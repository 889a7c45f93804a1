"""The seam to whatever moves bytes: registration, peers, one-sided posts. Nothing here waits.

All methods belong to one thread, the one that drives the fabric. Memory is addressed by absolute byte addresses of the
process that owns it. A completed WRITE is visible in the target's memory before `check` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import FabricError

Op = Literal["WRITE", "READ"]
PeerName = str
Handle = Hashable
Note = tuple[PeerName, bytes]
"""Who posted it (the name that `add_peer` gave), and what came with it."""
Addresses = NDArray[np.uint64]


class Fabric(Protocol):
    """One agent of one rank."""

    @property
    def touched(self) -> int:
        """How many calls so far may have let peers' accesses to our memory proceed, where the transport needs that."""

    def register(self, regions: list[tuple[int, int]], device: str) -> None:
        """Make `(address, bytes)` regions of `device` ('cpu' or 'cuda:N') accessible to peers. Once, at start.

        Raises `FabricError`.
        """

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and its registered memory."""

    def add_peer(self, metadata: bytes) -> PeerName:
        """Raises `FabricError`."""

    def remove_peer(self, peer: PeerName) -> None:
        """Forget the peer; its connections are torn down. Unknown names are ignored."""

    def post(
        self,
        op: Op,
        peer: PeerName,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        remote_device: str,
        note: bytes = b"",
    ) -> Handle:
        """Start copying `nbytes[i]` bytes between `local[i]` and `remote[i]`, all (N,) uint64. N is at least 1.
        `note`, if any, comes out of the peer's `progress` once all is copied.

        Raises `FabricError`; then nothing is in flight.
        """

    def repost(self, handle: Handle) -> None:
        """Start the copies of a complete handle once more; cheaper than a new one. Raises `FabricError`."""

    def check(self, handle: Handle) -> bool:
        """True when complete, False while in flight. Raises `FabricError` when it ended badly. Drives progress."""

    def release(self, handle: Handle) -> None:
        """Forget a handle; also the last resort for one that never completes."""

    def progress(self) -> Sequence[Note]:
        """Let peers' accesses to our memory proceed, where the transport needs our help (TCP); the notes that came."""

    def renew(self) -> None:
        """A new agent with the same memory, in place of this one, which nothing can reach any more: peers are gone, and
        `metadata` is another. Handles must have been released. Raises `FabricError`."""

    def close(self) -> None:
        """Deregister everything. Idempotent."""


def has_ended(fabric: Fabric, handle: Handle) -> bool:
    """`check`, where it is all one whether it went well."""
    try:
        return fabric.check(handle)
    except FabricError:
        return True


MakeFabric = Callable[[str], Fabric]
"""Name -> fabric. It can be pickled, since a probe's process makes its own fabric with it."""
