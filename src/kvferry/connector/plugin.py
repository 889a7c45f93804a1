"""vLLM plugins, loaded in each of its processes; idempotent.

The general one makes the connector known by name, so that MultiConnector can compose it. The platform one brings no
platform: it is where vLLM first calls out of tree, seconds before general plugins are loaded and minutes before the
connector of a large model is made, so the connector's settings are checked there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from kvferry.auth import check_reach, load_key
from kvferry.config import ConnectorConfig, connector_config
from kvferry.errors import ConfigError, side_channel_taken

_CHECKED = "KVFERRY_SETTINGS_CHECKED"
"""Holds the command line that was checked, and is inherited: vLLM's further processes have the same one, and would find
the port taken by our own first rank."""


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVFerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.connector.connector", "KVFerryConnector")


def check_settings() -> None:
    """Ends the first process with one line on stderr where `preflight` finds an error. None: no platform is meant."""
    started_as = "\0".join(sys.argv).encode().hex()
    if os.environ.get(_CHECKED) != started_as:
        os.environ[_CHECKED] = started_as
        try:
            preflight(sys.argv)
        except ConfigError as error:
            sys.exit(f"kvferry: error: {error}")


def preflight(argv: Sequence[str]) -> None:
    """Raises `ConfigError` for settings in vLLM's command line that the connector would refuse later."""
    transfer = _transfer_config(argv)
    if transfer.get("kv_connector") == "KVFerryConnector":
        config = connector_config(transfer.get("kv_connector_extra_config") or {})
        check_reach(config.side_channel_host, load_key(config.auth_key_file))
        _check_port(config)


def _transfer_config(argv: Sequence[str]) -> dict[str, Any]:
    """The value of `--kv-transfer-config`, {} if there is none that we understand; judging it is vLLM's part."""
    text = ""
    for index, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == "--kv-transfer-config":
            text = value if equals else next(iter(argv[index + 1 :]), "")
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _check_port(config: ConnectorConfig) -> None:
    host, port = config.side_channel_host, config.side_channel_port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise side_channel_taken(host, port, error) from None
