"""The worker's KV tensors as a `Layout`: what is where, in bytes.

vLLM gives each layer a view of shape (blocks, heads, tokens, channels), channels = K and V of one token of one head; on
CPU the kernels pack tokens inside one head of one block, so it can only be moved whole. MLA caches have no head axis.
A scheduler block may be several kernel blocks; blocks here are kernel blocks (`ratio` of them make one of the
scheduler's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.errors import CompatError
from kvferry.protocol.messages import Layout, Plane

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Caches:
    layout: Layout
    regions: list[tuple[int, int]]  # (address, bytes) of each backing storage
    ratio: int  # kernel blocks per scheduler block
    plane_of: Mapping[str, int] = field(default_factory=dict)  # layer name -> index of its plane


def _plane(name: str, cache: torch.Tensor) -> tuple[Plane, int, int]:
    """(plane, heads, tokens per block)."""
    size = cache.element_size()
    if cache.dim() == 3:  # MLA: (blocks, tokens, channels)
        cache = cache.unsqueeze(1)
    if cache.dim() != 4:
        raise CompatError(f"KV cache of {name} has shape {tuple(cache.shape)}", hint="expected 3 or 4 dimensions")
    _, heads, tokens, channels = cache.shape
    block, head, token, channel = (stride * size for stride in cache.stride())
    if channel != size or token != channels * size or (heads > 1 and head < tokens * token):
        hint = "set VLLM_KV_CACHE_LAYOUT=LBHNC (heads outside tokens)"
        raise CompatError(f"KV cache of {name}: strides {cache.stride()} interleave heads and tokens", hint=hint)
    plane = Plane(
        base=cache.data_ptr(), block_stride=block, head_stride=head if heads > 1 else tokens * token, token_bytes=token
    )
    return plane, heads, tokens


def describe(
    kv_caches: dict[str, torch.Tensor], block_size: int, total_heads: int, fingerprint: dict[str, str]
) -> Caches:
    """Raises `CompatError` for caches that can't be addressed this way. Layers that share a tensor count once."""
    planes: dict[int, Plane] = {}
    bases: dict[str, int] = {}
    storages: dict[int, int] = {}
    shapes = set()
    device: Any = None
    for name, cache in kv_caches.items():
        plane, heads, tokens = _plane(name, cache)
        planes.setdefault(plane.base, plane)
        bases[name] = plane.base
        shapes.add((heads, tokens, cache.shape[0]))
        storage = cache.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        device = cache.device
    if len(shapes) != 1:
        raise CompatError(f"layers differ in (heads, tokens, blocks): {sorted(shapes)}", hint="hybrid models: not yet")
    heads, tokens, num_blocks = shapes.pop()
    if block_size % tokens:
        raise CompatError(f"scheduler block of {block_size} tokens, kernel block of {tokens}", hint="must divide")
    layout = Layout(
        planes=tuple(planes.values()),
        num_blocks=num_blocks,
        block_size=tokens,
        heads=heads,
        total_heads=max(total_heads, heads),
        divisible=device.type != "cpu",
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        fingerprint=fingerprint,
    )
    index = {base: at for at, base in enumerate(planes)}
    plane_of = {name: index[base] for name, base in bases.items()}
    return Caches(layout, list(storages.items()), block_size // tokens, plane_of)


def expand(block_ids: tuple[int, ...], ratio: int) -> tuple[int, ...]:
    """Scheduler block ids -> kernel block ids."""
    if ratio == 1:
        return block_ids
    return tuple(block * ratio + i for block in block_ids for i in range(ratio))
