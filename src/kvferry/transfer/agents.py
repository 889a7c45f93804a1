"""Other engines' NIXL agents that this one has loaded, and those it has let go of but would know again.

NIXL does not close the connections of an agent that is removed: each time that a living one is removed and loaded anew,
its TCP sockets are left behind on both sides. So one that is let go of stays loaded, and is taken up again when its
metadata come again; unless a post to it has failed, which may be its connection's fault. Owned by the fabric's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.transfer.fabric import PeerName

MOST_AT_REST = 16
"""Those that were let go of first are removed for good beyond this: mostly of engines that are no more."""


class Agents:
    """`load(metadata)` and `remove(name)`: NIXL's."""

    def __init__(self, load: Callable[[bytes], PeerName], remove: Callable[[PeerName], None]) -> None:
        self._load, self._remove = load, remove
        self._loaded: dict[PeerName, bytes] = {}
        self._at_rest: dict[PeerName, None] = {}
        self._failed: set[PeerName] = set()

    def add(self, metadata: bytes) -> PeerName:
        """Raises what `load` does."""
        name = next((name for name, known in self._loaded.items() if known == metadata), None)
        if name is None or name in self._failed:
            name = self._load(metadata)
            self._loaded[name] = metadata
            self._failed.discard(name)
        self._at_rest.pop(name, None)
        return name

    def let_go(self, name: PeerName) -> None:
        """Nothing is posted to it until it is added again. Unknown ones: nothing."""
        if name not in self._loaded:
            return
        self._at_rest[name] = None
        if name in self._failed:
            self._forget(name)
        while len(self._at_rest) > MOST_AT_REST:
            self._forget(next(iter(self._at_rest)))

    def at_rest(self, name: PeerName) -> bool:
        return name in self._at_rest

    def failed(self, name: PeerName) -> None:
        """Something that was posted to it has failed: it is loaded anew, if it comes again."""
        if name in self._at_rest:
            self._forget(name)
        elif name in self._loaded:
            self._failed.add(name)

    def _forget(self, name: PeerName) -> None:
        self._remove(name)
        del self._at_rest[name], self._loaded[name]
        self._failed.discard(name)
