"""What the doctor's tests take for an engine's memory."""

from __future__ import annotations

from kvferry.protocol.messages import Layout, Plane

PLANE = Plane(base=4096, block_stride=4096, head_stride=1024, token_bytes=64)
LAYOUT = Layout(
    planes=(PLANE, PLANE),
    num_blocks=64,
    block_size=16,
    heads=4,
    total_heads=4,
    divisible=True,
    device="cpu",
    fingerprint={},
)
