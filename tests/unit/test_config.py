"""Settings are strict, and docs/configuration.md lists every one of them with its default."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import msgspec
import pytest

from kvferry.config import ConnectorConfig, connector_config, parse_address
from kvferry.connector.params import LandingParams, SourceParams, parse
from kvferry.connector.plugin import preflight
from kvferry.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def test_page_lists_every_key_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE))
    fields = {field.name: field for field in msgspec.structs.fields(ConnectorConfig)}
    assert list(rows) == list(fields)
    for name, field in fields.items():
        if (
            isinstance(field.default, float | int)
            and not isinstance(field.default, bool)
            and name != "side_channel_port"
        ):
            assert float(rows[name]) == field.default, name
    assert rows["mode"] == f"`{fields['mode'].default}`"


def test_unknown_key_names_the_nearest() -> None:
    """C80: a misspelt key."""
    with pytest.raises(ConfigError, match=r"unknown name 'leese_s' \(did you mean 'lease_s'\?\)"):
        connector_config({"leese_s": 5}, {})


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"mode": "pussh"}, r"^mode: 'pussh' \(expected one of push, pull, stream; did you mean 'push'\?\)$"),
        ({"mode": 7}, r"^mode: 7 \(expected one of push, pull, stream\)$"),
        ({"side_channel_port": "x"}, r"^side_channel_port: 'x' \(expected int\)$"),
        ({"peers": [5]}, r"^peers: \[5\] \(expected a list of str\)$"),
        ({"lease_s": 0}, "lease_s: 0"),
        ({"idle_wait_ms": 5000}, "idle_wait_ms: 5000"),
        ({"side_channel_port": 70000}, "side_channel_port: 70000"),
        ({"background": False}, "only pull can post in the engine loop"),
        ({"pull_by": "reed"}, r"^pull_by: 'reed' \(expected one of auto, read, write; did you mean 'read'\?\)$"),
        ({"pull_by": "write", "background": False, "mode": "pull"}, "set pull_by to 'auto' or 'read'"),
        ({"peers": ["nowhere"]}, "peers: 'nowhere'"),
        ({"peers": ["::1:5600"]}, r"\[::1\]:5600"),
        ({"lease_s": "long"}, r"^lease_s: 'long' \(expected float\)$"),
    ],
)
def test_wrong_values_are_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        connector_config(extra, {})


def test_side_channel_from_the_environment_of_vllm() -> None:
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}
    config = connector_config({}, environ)
    assert (config.side_channel_host, config.side_channel_port) == ("10.0.0.7", 5700)
    assert connector_config({"side_channel_port": 5999}, environ).side_channel_port == 5999
    assert (connector_config({}, {}).side_channel_host, connector_config({}, {}).side_channel_port) == (
        "127.0.0.1",
        5600,
    )


def test_other_connectors_time_out_changes_nothing() -> None:
    """C80: 5 s rules, whatever another connector's variable says."""
    assert connector_config({"lease_s": 5}, {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}).lease_s == 5


def test_addresses() -> None:
    """C65."""
    assert parse_address("[::1]:8100", "x") == ("::1", 8100)
    assert parse_address("host.example:1", "x") == ("host.example", 1)
    for text in ("host", "host:", "host:0", "host:99999", "::1:8100"):
        with pytest.raises(ConfigError):
            parse_address(text, "x")


def test_params() -> None:
    """C68: the first missing field is named; nothing that a client sends raises anything else."""
    full = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 1}
    assert isinstance(parse(full), LandingParams)
    assert isinstance(parse({"do_remote_decode": True, "transfer_id": "t"}), SourceParams)
    assert parse(None) is None and parse({}) is None and parse([1]) is None and parse({"x": 1}) is None
    for missing in ("transfer_id", "remote_host", "remote_port"):
        with pytest.raises(ConfigError, match=f"kv_transfer_params.{missing} is missing"):
            parse({key: value for key, value in full.items() if key != missing})
    for bad in (
        {"remote_port": "x"},
        {"remote_port": -5},
        {"remote_port": 70_000},
        {"remote_tp_size": -1},
        {"mode": "teleport"},
        {"transfer_id": 7},
        {"remote_tp_size": "two"},
    ):
        with pytest.raises(ConfigError):
            parse({**full, **bad})


def test_preflight_reads_vllms_command_line() -> None:
    """C66, C80: settings are judged before a model is loaded; what is not ours is left to vLLM."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def argv(**extra: object) -> list[str]:
            ours = {"kv_connector": "KVFerryConnector", "kv_connector_extra_config": extra}
            return ["api_server.py", "--port", "1", "--kv-transfer-config", json.dumps(ours)]

        with pytest.raises(ConfigError, match=f"side channel 127.0.0.1:{port} is taken .set side_channel_port"):
            preflight(argv(side_channel_port=port))
        with pytest.raises(ConfigError, match="did you mean 'lease_s'"):
            preflight([f"--kv-transfer-config={argv(leese_s=1)[-1]}"])
    preflight(argv(side_channel_port=port))
    for other in ([], ["--kv-transfer-config"], ["--kv-transfer-config", "{"], ["--kv-transfer-config", "[1]"]):
        preflight(other)
    preflight(["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"x": 1}}'])
