"""What engines told of transfers in the story files that they share with the router, read as it is appended.

Each look costs what was written since the last one; nothing is read unless somebody looks. Without a shared `story_dir`
there is nothing here, and no engine is asked for it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.router.seen.record import Event

MOST_TRANSFERS = 1000
MOST_LINES = 200
"""Of one transfer: a stream may have hundreds of chunks."""
MOST_BYTES = 4 * 1024 * 1024
"""Of one file at one look; the rest is there at the next."""


class Line(msgspec.Struct, frozen=True):
    """What is looked at of a story's line."""

    t: float
    transfer_id: str
    side: str
    event: str
    nbytes: int = 0


class Told:
    """`read` from any thread; the rest from the event loop."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._reading = threading.Lock()
        self._decoder = msgspec.json.Decoder(Line)
        self._at = {path: path.stat().st_size for path in self._files()}
        self._lines: OrderedDict[str, list[Line]] = OrderedDict()
        self._landed: deque[str] = deque(maxlen=MOST_TRANSFERS)
        self._counted: set[str] = set()

    def _files(self) -> Iterator[Path]:
        for path in self._folder.glob("*.jsonl"):
            if not path.name.startswith("router-"):
                yield path

    def read(self) -> None:
        """Take in what has been appended since the last time."""
        with self._reading:
            for path in self._files():
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at.get(path, 0):
                    self._at[path] = 0
                file.seek(self._at.get(path, 0))
                raw = file.read(MOST_BYTES)
        except FileNotFoundError:  # swept away between two looks
            return
        whole, newline, _ = raw.rpartition(b"\n")
        if newline:
            self._at[path] = self._at.get(path, 0) + len(whole) + 1
            for line in whole.split(b"\n"):
                self._take(line)

    def _take(self, raw: bytes) -> None:
        try:
            line = self._decoder.decode(raw)
        except msgspec.MsgspecError:  # of a writer that was cut off, on a full disk
            return
        transfer_id = line.transfer_id
        lines = self._lines.setdefault(transfer_id, [])
        if len(lines) < MOST_LINES:
            lines.append(line)
        if line.event == "landed" and transfer_id not in self._counted:
            self._counted.add(transfer_id)
            self._landed.append(transfer_id)
        while len(self._lines) > MOST_TRANSFERS:
            self._counted.discard(self._lines.popitem(last=False)[0])

    def events(self, transfer_id: str) -> list[Event]:
        """By the order in which they were read."""
        return [Event(line.event, line.side, line.t) for line in self._lines.get(transfer_id, ())]

    def moved(self, transfer_id: str) -> int:
        """Bytes that were posted for it."""
        return sum(line.nbytes for line in self._lines.get(transfer_id, ()) if line.event == "posted")

    def ended(self) -> Iterator[tuple[int, float]]:
        """Bytes, and seconds from the first post to landed, of each transfer that landed since the last call."""
        while self._landed:
            transfer_id = self._landed.popleft()
            lines = self._lines.get(transfer_id, ())
            posts = [line.t for line in lines if line.event == "posted"]
            landed = max((line.t for line in lines if line.event == "landed"), default=0.0)
            if posts:
                yield self.moved(transfer_id), max(landed - min(posts), 0.0)
