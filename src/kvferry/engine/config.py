"""What one engine is started with, after command line and profile are one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.engine.profile import Profile
from kvferry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`kv_transfer`: the parsed `--kv-transfer-config`. `byte_scale`: every head's bytes of a token are this many times
    fewer than the model's; the number of pieces to transfer stays. `device`: 'cpu' or 'cuda:N'.
    """

    profile: Profile
    served_model_name: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    tp: int = 1
    kv_transfer: Mapping[str, Any] | None = None
    enable_prefix_caching: bool = True
    byte_scale: int = 1
    fragmentation: float = 0.0
    device: str = "cpu"
    debug_invariants: bool = False

    @property
    def cell_bytes(self) -> int:
        """Of one token of one head of one layer in this engine's memory."""
        return self.profile.shape.cell_bytes // self.byte_scale

    def check(self) -> None:
        """Raises `ConfigError`."""
        cell, heads = self.profile.shape.cell_bytes, self.profile.shape.kv_heads
        if self.byte_scale < 1 or cell % self.byte_scale:
            known = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if cell % n == 0]
            raise ConfigError(
                f"byte_scale: {self.byte_scale} does not divide the {cell} bytes of a token's head",
                hint=f"one of {', '.join(map(str, known))}",
            )
        if self.tp < 1 or (heads % self.tp and self.tp % heads):
            raise ConfigError(
                f"tensor_parallel_size: {self.tp} ranks cannot share {heads} KV heads",
                hint="one of the two must divide the other",
            )
        if not 0 <= self.fragmentation <= 1:
            raise ConfigError(f"fragmentation: {self.fragmentation}", hint="expected 0 to 1")
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}", hint="expected at least 1")
        if self.vocab_size < 512:
            raise ConfigError(f"vocab_size: {self.vocab_size}", hint="expected at least 512")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"max_model_len: {self.max_model_len} tokens do not fit into {self.num_blocks} blocks of "
                f"{self.block_size}",
                hint="raise --num-gpu-blocks-override or lower --max-model-len",
            )

    def heads_of(self, rank: int) -> range:
        """The model's KV heads that a rank stores, by vLLM's rule: more ranks than heads replicate them."""
        total = self.profile.shape.kv_heads
        first = rank * total // self.tp
        return range(first, first + max(1, total // self.tp))

    def fingerprint(self) -> dict[str, str]:
        """What must be equal on both sides besides the layout."""
        shape = self.profile.shape
        return {
            "model": f"{self.served_model_name}#{shape.layers}x{shape.kv_heads}x{shape.head_size}",
            "kv_cache_dtype": f"{8 * shape.element_bytes} bit / {self.byte_scale}",
            "kv_packing": "plain",
        }
