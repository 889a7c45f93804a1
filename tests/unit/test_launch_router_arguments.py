"""`--router-arg`: what the router would refuse is one error before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec


def spec(*args: str, **more: Any) -> DeploymentSpec:
    return DeploymentSpec(engine="sim", router_args=args, **more)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--retris=0"], "unrecognized arguments: --retris=0, did you mean --retries?"),
        (["--retries", "many"], "--retries: invalid int value: 'many'"),
        (["--retries=-1"], "--retries: -1"),
        (["--decode-policy=leest_loaded"], "least_loaded"),
        (["--session-ttl=0"], "--session-ttl: 0"),
        (["--bind=late"], "--bind"),
        (["--first-token=prefill"], "--first-token: 'prefill' with mode push"),
        (["--ssl-keyfile=/nowhere/key.pem"], "--ssl-keyfile without --ssl-certfile"),
        (["--client-key-file=/nowhere/keys"], "/nowhere/keys"),
        (["--discover=file:/nowhere/e.yaml"], "/nowhere/e.yaml"),
        (["--otlp-traces-endpoint=collector:4317"], "--otlp-traces-endpoint: 'collector:4317'"),
        (["--port=9000"], "--port is set by kvferry itself"),
        (["--mode", "pull"], "--mode is set by kvferry itself"),
        (["--help"], "--help"),
    ],
)
def test_what_is_wrong_is_said_at_once(args: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Deployment(spec(*args, state_dir=tmp_path / "state"))
    text = str(caught.value)
    assert text.startswith("--router-arg: ") and said in text and "\n" not in text
    assert not (tmp_path / "state").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("mode", "args"),
    [
        ("push", ["--retries", "0", "--decode-policy=session", "--session-ttl", "60"]),
        ("pull", ["--first-token", "prefill"]),
        ("stream", ["--bind", "late", "--first-token", "prefill"]),
        ("stream", ["--bind=at=50"]),
        ("colocated", ["--decode-policy", "round_robin"]),
    ],
)
def test_what_is_right_passes(mode: str, args: list[str], tmp_path: Path) -> None:
    Deployment(spec(*args, mode=mode, prefill=2, decode=2, state_dir=tmp_path / "state"))


def test_upstreams_connectors_have_their_modes(tmp_path: Path) -> None:
    for mode in ("upstream-pull", "upstream-push"):
        Deployment(DeploymentSpec(mode=mode, router_args=["--retries=1"], state_dir=tmp_path / "state"))


def test_another_routers_arguments_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_ROUTER_COMMAND", "another router")
    Deployment(spec("--whatever", state_dir=tmp_path / "state"))
