"""The KV connector for stock vLLM: `--kv-transfer-config '{"kv_connector": "KVFerryConnector",
"kv_connector_module_path": "kvferry.connector", ...}'`.

Only this package imports vllm, and only when the class is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVFerryConnector":
        from kvferry.connector.connector import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
