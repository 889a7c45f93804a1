"""vLLM general plugin: makes the connector known by name, so that MultiConnector can compose it. Idempotent."""

from __future__ import annotations


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVFerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.connector.connector", "KVFerryConnector")
