"""Everything that reaches into vLLM beyond the connector interface, with what differs from 0.30 to 0.33."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def rank_and_size(vllm_config: Any, in_worker: bool) -> tuple[int, int, int]:
    """(tensor-parallel rank, tensor-parallel size, data-parallel rank). The scheduler has rank 0."""
    parallel = vllm_config.parallel_config
    dp_rank = int(getattr(parallel, "data_parallel_index", 0) or 0)
    if not in_worker:
        return 0, parallel.tensor_parallel_size, dp_rank
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), parallel.tensor_parallel_size, dp_rank


def wanted_layout(vllm_config: Any) -> str:
    """The layout to ask vLLM for. Heads lie outside of tokens in either, so that one head of one block is contiguous
    whatever the TP size.

    'BLHNC' has the blocks outermost: one block of all layers is one region. vLLM can't split such blocks into kernel
    blocks, so it is asked for with the block size that all kernels take (16), and not for MLA or on CPUs, whose kernels
    have one layout. Where the attention backend lacks it, vLLM warns and takes its own.
    """
    from vllm.platforms import current_platform

    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # before this enum there were no layouts across layers
        return "LBHNC"
    tidy = not current_platform.is_cpu() and not vllm_config.model_config.use_mla
    if tidy and vllm_config.cache_config.block_size == 16 and hasattr(KVCacheLayout, "BLHNC"):
        return "BLHNC"
    return "LBHNC"


def total_kv_heads(vllm_config: Any) -> int:
    return 1 if vllm_config.model_config.use_mla else int(vllm_config.model_config.get_total_num_kv_heads())


def fingerprint(vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> dict[str, str]:
    """What must be equal on both sides besides the layout, by name.

    The model is named by its folder's or repository's last part and a hash of its configuration: the same model may
    lie under different paths.
    """
    model = vllm_config.model_config
    cache = next(iter(kv_caches.values()))
    raw = model.hf_config.to_dict()
    kept = {
        k: v
        for k, v in raw.items()
        if not k.startswith("_") and k not in ("transformers_version", "torch_dtype", "dtype")
    }
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return {
        "model": f"{os.path.basename(str(model.model).rstrip('/'))}#{digest}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "kv_packing": _packing(cache),
    }


def _packing(cache: torch.Tensor) -> str:
    """CPU attention kernels lay tokens out by instruction set; on GPUs they lie one after the other."""
    if cache.device.type != "cpu":
        return "plain"
    import torch

    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{' amx' if amx else ''}"


def touch_pages(kv_caches: dict[str, torch.Tensor]) -> None:
    """CPU: make the kernel give the cache its pages now, not in the first transfer (seconds for some GiB)."""
    for cache in kv_caches.values():
        if cache.device.type == "cpu":
            cache.zero_()


def stats_module() -> ModuleType | None:
    """`kvferry.connector.stats`; None, and nothing is exported, where vLLM lacks the classes that it builds on."""
    try:
        return importlib.import_module("kvferry.connector.stats")
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        return None


def log_like_vllm() -> None:
    """Let our log lines go where vLLM's go; they carry no handler of their own."""
    import logging

    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False
