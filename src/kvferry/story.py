"""What happened to one transfer, told by every process that touched it.

Each process appends lines of JSON to its own file `<side>-<pid>.jsonl` in one folder; a story is those lines for
one transfer id, sorted by wall-clock time. Only the thread that owns a `Story` writes to it, except that `note` may be
called from any thread: one `write` of one line to an unbuffered append-only file is not torn.

docs/journey.md lists the events.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.ids import TransferId

# Label, the event that ends the step, the events that may begin it: the latest of those that came before the end.
STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dispatched", "dispatched", ("received",)),
    ("queued", "queued", ("received", "dispatched")),
    ("rewound", "rewound", ("queued",)),
    ("prefill", "computed", ("queued", "rewound")),
    ("prefill reply", "prefill_done", ("computed",)),
    ("bound", "bound", ("dispatched", "prefill_done")),
    ("allocated", "allocated", ("dispatched", "prefill_done", "bound")),
    ("registered", "registered", ("dispatched", "prefill_done", "allocated")),
    ("matched", "matched", ("registered", "computed")),
    ("granted", "granted", ("matched",)),
    ("posted", "posted", ("matched", "granted")),
    ("chunks", "written", ("posted",)),
    ("landed", "landed", ("posted", "computed")),
    ("first token", "first_token", ("landed",)),
    ("last token", "last_token", ("first_token",)),
)


def story_side(kv_role: str) -> str:
    """The side under which an engine of this role tells: 'prefill', 'decode' or 'both'."""
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role, "both")


class Story:
    """Writer of one process. `folder=None` makes every call a no-op. Raises `ConfigError` if it can't be written to."""

    def __init__(self, folder: str | os.PathLike[str] | None, side: str, rank: int = 0) -> None:
        self.side = side
        self.rank = rank
        self._fd = -1
        if folder:
            path = Path(folder) / f"{side}-{os.getpid()}.jsonl"
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as error:
                hint = "expected a folder that this process can write to, or can make"
                raise ConfigError(f"story_dir: {os.fspath(folder)}: {error.strerror}", hint=hint) from None

    @property
    def on(self) -> bool:
        return self._fd >= 0

    def note(self, transfer_id: TransferId | str, event: str, *, t: float | None = None, **facts: Any) -> None:
        """Append one line. `t`: wall-clock seconds, now if absent. `facts` must be JSON values."""
        if self._fd < 0:
            return
        line = {
            "t": time.time() if t is None else t,
            "transfer_id": transfer_id,
            "side": self.side,
            "rank": self.rank,
            "event": event,
            **facts,
        }
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(folder: str | os.PathLike[str], only: bytes = b"") -> Iterator[dict[str, Any]]:
    """All complete lines of all files of `folder` that hold `only`, file by file."""
    for path in sorted(Path(folder).glob("*.jsonl")):
        for raw in path.read_bytes().split(b"\n")[:-1]:
            if raw and only in raw:
                yield json.loads(raw)


def read_story(folder: str | os.PathLike[str], transfer_id: TransferId | str) -> list[dict[str, Any]]:
    """The lines of one transfer, by time."""
    written = json.dumps(transfer_id).encode()
    lines = [line for line in read_lines(folder, written) if line["transfer_id"] == transfer_id]
    return sorted(lines, key=lambda line: line["t"])
