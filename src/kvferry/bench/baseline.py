"""vLLM general plugin for the tuned upstream baseline: leaves out one system call of vLLM's own NIXL connectors.

Their constructor pins the calling thread, which is the one that runs the forward, to the last core of each NUMA node
(`nixl/base_worker.py`, CPU only). Two engines on one small machine then share one core. With
`KVFERRY_BENCH_NO_AFFINITY=1` that module sees an `os` whose `sched_setaffinity` does nothing; nothing else does.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

SWITCH = "KVFERRY_BENCH_NO_AFFINITY"
TARGET = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"

# Below `vllm`, so that the line lands in the engine's log under vLLM's own logging configuration.
log = logging.getLogger("vllm.kvferry.bench")


class UnpinnedOs:
    """The module `os` for one module, but for `sched_setaffinity`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def sched_setaffinity(self, pid: int, cores: object) -> None:
        log.info("%s=1: vLLM's NIXL connector does not pin its thread to cores %s", SWITCH, cores)


def register() -> None:
    """Called by vLLM in every process of an engine. Idempotent; without the switch it imports nothing."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        module: Any = importlib.import_module(TARGET)
    except ImportError as error:
        log.warning("%s=1, but %s cannot be imported: %s", SWITCH, TARGET, error)
        return
    if not isinstance(module.os, UnpinnedOs):
        module.os = UnpinnedOs()
