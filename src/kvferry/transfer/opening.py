"""A request on D whose prefill engine isn't connected yet."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.messages import Welcome
from kvferry.transfer.commands import Land


@dataclass
class Opening:
    """`due`: until then P must have been reached, in the core's monotonic seconds."""

    land: Land
    due: float

    def found_other(self, found: Welcome, name: str) -> tuple[str, str] | None:
        """Code and reason, where the engine at that address is not the one that the request names."""
        land = self.land
        if land.engine_id and land.engine_id != found.engine_id:
            return "wrong_engine", (
                f"remote_engine_id: the request says {land.engine_id!r}, {land.host}:{land.port} is {found.engine_id!r}"
            )
        if land.tp_size and land.tp_size != found.tp_size:
            return "wrong_tp_size", f"remote_tp_size: the request says {land.tp_size}, {name} has {found.tp_size}"
        return None
