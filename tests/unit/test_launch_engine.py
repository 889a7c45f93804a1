from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine import main as engine_main
from kvferry.engine.profile import load
from kvferry.engine.text import Builtin
from kvferry.errors import ConfigError
from kvferry.launch import engine as engines
from kvferry.launch.engine import UNIPROC, Engine
from kvferry.launch.routing import router_command
from kvferry.launch.spec import DeploymentSpec, arg_value, served_name, tensor_parallel
from kvferry.launch.state import StateDir

PREFILL = Engine("prefill-0", "prefill", 8100, 5600, 1, 0)
DECODE = Engine("decode-0", "decode", 8200, 5700, 1, 1)
PLAIN = Engine("engine-0", "colocated", 8300, 0, 1, 0)
PEERS = ["127.0.0.1:5600"]


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "gpus", lambda: 0)
    for name in ("KVFERRY_ENGINE_COMMAND", "KVFERRY_ROUTER_COMMAND", "OMP_NUM_THREADS", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)


def _command(spec: DeploymentSpec, engine: Engine) -> list[str]:
    return engines.command(spec, spec.check(), engine, Path("/models/m"), PEERS)


def _config(spec: DeploymentSpec, engine: Engine) -> dict[str, Any]:
    line = _command(spec, engine)
    config: dict[str, Any] = json.loads(line[line.index("--kv-transfer-config") + 1])
    return config


def test_cpu_engines_are_tuned_and_users_arguments_come_last() -> None:
    line = _command(DeploymentSpec(mode="push", vllm_args=["--max-model-len", "999"]), PREFILL)
    assert line[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert arg_value(line, "--distributed-executor-backend") == UNIPROC
    assert arg_value(line, "--served-model-name") == "smollm2"
    assert arg_value(line, "--port") == "8100"
    assert arg_value(line, "--max-model-len") == "999"
    assert "--enforce-eager" in line
    assert line[-2:] == ["--max-model-len", "999"]
    one = DeploymentSpec(mode="push", vllm_args=["--max-model-len", "999"], one_args={"prefill-0": ["--x"]})
    assert _command(one, PREFILL)[-3:] == ["--max-model-len", "999", "--x"] and "--x" not in _command(one, DECODE)


def test_as_shipped_leaves_executor_openmp_and_threads_alone(tmp_path: Path) -> None:
    spec = DeploymentSpec(mode="upstream-push", tuned=False)
    assert UNIPROC not in _command(spec, DECODE)
    assert "num_threads" not in _config(spec, DECODE)["kv_connector_extra_config"]
    env = engines.environment(spec, spec.check(), DECODE, tmp_path)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "KVFERRY_BENCH_NO_AFFINITY"} & set(env)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_several_ranks_on_cpus_keep_vllms_own_executor() -> None:
    spec = DeploymentSpec(mode="push", vllm_args=["--tensor-parallel-size=2"])
    assert UNIPROC not in _command(spec, Engine("prefill-0", "prefill", 1, 2, 2, 0))


def test_with_gpus_no_cpu_setting_is_there_and_devices_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = DeploymentSpec(mode="push", decode_args=["-tp", "2"])
    decode = Engine("decode-0", "decode", 8200, 5700, 2, 1)
    line = _command(spec, decode)
    env = engines.environment(spec, spec.check(), decode, tmp_path)
    assert UNIPROC not in line and "--enforce-eager" not in line
    assert "VLLM_CPU_KVCACHE_SPACE" not in env and "UCX_TLS" not in env and "OMP_WAIT_POLICY" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    too_far = Engine("decode-1", "decode", 8200, 5700, 2, 2)
    assert "CUDA_VISIBLE_DEVICES" not in engines.environment(spec, spec.check(), too_far, tmp_path)


def test_kvferry_config_per_role(tmp_path: Path) -> None:
    spec = DeploymentSpec(
        mode="push", state_dir=tmp_path, extra_config={"lease_s": 3}, decode_extra_config={"lease_s": 4, "audit": True}
    )
    assert _config(spec, PREFILL) == {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.connector",
        "kv_role": "kv_producer",
        "engine_id": "prefill-0",
        "kv_connector_extra_config": {
            "mode": "push",
            "side_channel_host": "127.0.0.1",
            "side_channel_port": 5600,
            "story_dir": str(tmp_path / "story"),
            "auth_key_file": str(tmp_path / "auth.key"),
            "lease_s": 3,
        },
    }
    decode = _config(spec, DECODE)
    assert decode["kv_role"] == "kv_consumer"
    extra = decode["kv_connector_extra_config"]
    assert extra["peers"] == PEERS
    assert extra["lease_s"] == 4 and extra["audit"] is True
    assert "background" not in extra
    assert decode["kv_load_failure_policy"] == "fail"
    again = DeploymentSpec(mode="push", state_dir=tmp_path, kv_load_failure_policy="recompute")
    assert _config(again, DECODE)["kv_load_failure_policy"] == "recompute"


def test_inline_pull_posts_in_the_decode_engines_loop_only() -> None:
    spec = DeploymentSpec(mode="pull-inline")
    assert _config(spec, DECODE)["kv_connector_extra_config"]["background"] is False
    assert _config(spec, DECODE)["kv_connector_extra_config"]["mode"] == "pull"
    assert "background" not in _config(spec, PREFILL)["kv_connector_extra_config"]


@pytest.mark.parametrize(
    ("mode", "connector", "roles"),
    [
        ("upstream-pull", "NixlConnector", ("kv_both", "kv_both")),
        ("upstream-push", "NixlPushConnector", ("kv_producer", "kv_consumer")),
    ],
)
def test_upstream_configs_are_tuned(mode: str, connector: str, roles: tuple[str, str], tmp_path: Path) -> None:
    spec = DeploymentSpec(mode=mode)
    for engine, role in zip((PREFILL, DECODE), roles, strict=True):
        config = _config(spec, engine)
        assert (config["kv_connector"], config["kv_role"], config["engine_id"]) == (connector, role, engine.name)
        assert config["kv_connector_extra_config"] == {"num_threads": 0}
        env = engines.environment(spec, spec.check(), engine, tmp_path)
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.side_port)
        assert env["KVFERRY_BENCH_NO_AFFINITY"] == "1"


def test_environment_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    spec = DeploymentSpec(mode="push", env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    env = engines.environment(spec, spec.check(), PREFILL, tmp_path)
    assert env["UCX_TLS"] == "tcp", "exported by the caller"
    assert env["OMP_NUM_THREADS"] == "1", "tuned the same everywhere"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2", "asked for in the spec"


def test_engine_command_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ENGINE_COMMAND", "numactl -N 0 'my engine'")
    assert _command(DeploymentSpec(mode="colocated"), PLAIN)[:5] == ["numactl", "-N", "0", "my engine", "--host"]


def test_router_command_names_every_engine_and_the_dialect(tmp_path: Path) -> None:
    spec = DeploymentSpec(mode="pull-inline", router_args=["--request-timeout", "9"])
    line = router_command(spec, [PREFILL, DECODE], spec.check(), 8000, StateDir(tmp_path))
    assert arg_value(line, "--auth-key-file") == str(tmp_path / "auth.key")
    assert arg_value(line, "--prefill") == "http://127.0.0.1:8100,side_channel=127.0.0.1:5600,engine_id=prefill-0,tp=1"
    assert (arg_value(line, "--connector"), arg_value(line, "--mode")) == ("kvferry", "pull")
    assert line[-2:] == ["--request-timeout", "9"]
    plain = DeploymentSpec(mode="colocated")
    line = router_command(plain, [PLAIN], plain.check(), 8000, StateDir(tmp_path))
    assert arg_value(line, "--auth-key-file") is None
    assert arg_value(line, "--decode") == "http://127.0.0.1:8300"
    assert (arg_value(line, "--connector"), arg_value(line, "--mode")) == ("none", "colocated")
    assert arg_value(line, "--bind") is None
    streams = DeploymentSpec(mode="stream", bind="at=50")
    line = router_command(streams, [PREFILL, DECODE], streams.check(), 8000, StateDir(tmp_path))
    assert (arg_value(line, "--mode"), arg_value(line, "--bind")) == ("stream", "at=50")


def test_names_and_argument_lookup() -> None:
    assert [name for name, _ in DeploymentSpec(mode="push", prefill=2).names()] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    assert DeploymentSpec(mode="colocated", decode=2).names() == [("engine-0", "colocated"), ("engine-1", "colocated")]
    assert served_name("/a/b/", []) == "b"
    assert served_name("smollm2", ["--served-model-name=x"]) == "x"
    assert tensor_parallel(["-tp", "4"]) == 4
    with pytest.raises(ConfigError, match="not a whole number"):
        tensor_parallel(["-tp", "four"])


@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_debug_invariants_reach_every_engine(engine: str) -> None:
    for one in (PREFILL, DECODE):
        on = DeploymentSpec(mode="push", engine=engine, debug_invariants=True)
        assert _config(on, one)["kv_connector_extra_config"]["debug_invariants"] is True
        assert ("--debug-invariants" in _command(on, one)) == (engine == "sim")
        off = _command(DeploymentSpec(mode="push", engine=engine), one)
        assert "debug" not in " ".join(off)


def test_debug_invariants_of_a_lone_engine_reach_its_connector() -> None:
    parser = argparse.ArgumentParser()
    engine_main.add_arguments(parser)
    transfer = '{"kv_role": "kv_producer", "kv_connector_extra_config": {"lease_s": 5}}'
    args = parser.parse_args(["--debug-invariants", "--kv-transfer-config", transfer])
    engine, _ = engine_main.configs_of(args, load("instant"), Builtin(32000))
    assert engine.debug_invariants and engine.kv_transfer is not None
    assert engine.kv_transfer["kv_connector_extra_config"] == {"lease_s": 5, "debug_invariants": True}
