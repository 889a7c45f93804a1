"""A request whose prefill engine isn't connected yet. Owned by the core's thread."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.transfer.commands import Land


@dataclass
class Opening:
    """`due`: when it fails if the engine can't be reached by then, in the core's monotonic seconds."""

    land: Land
    due: float
