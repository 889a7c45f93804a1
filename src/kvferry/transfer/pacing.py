"""How one registration's KV leaves while prefill runs: the settings and what transfers were seen to cost, in tokens."""

from __future__ import annotations

from kvferry.config import ConnectorConfig
from kvferry.protocol.cost import CostMeter
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Layout
from kvferry.protocol.plan import total_bytes
from kvferry.protocol.stream import Pace


def pace(config: ConnectorConfig, mine: Layout, theirs: Layout, share: HeadShare | None, meter: CostMeter) -> Pace:
    """`mine`: P's. `share`: what the registration takes, None: nothing."""
    unit, packed = max(mine.block_size, theirs.block_size), not (mine.divisible and theirs.divisible)
    token_bytes = total_bytes(mine, theirs, share, 0, unit) / unit if share is not None else 0
    if not token_bytes:
        return Pace(unit, packed=packed)
    worth = config.stream_chunk_bytes or meter.cost.least_bytes(meter.bytes_per_descriptor)
    least = int(worth / token_bytes)
    most = max(unit, int(config.stream_write_bytes / token_bytes) // unit * unit)
    return Pace(unit, least, most, token_bytes, packed)
