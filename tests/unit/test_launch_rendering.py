"""The command lines of a deployment with a render tier."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.launch import engine as engines
from kvferry.launch import rendering
from kvferry.launch.engine import MIDDLEWARE, Engine
from kvferry.launch.rendering import render_command, render_environment
from kvferry.launch.routing import router_command
from kvferry.launch.spec import DeploymentSpec, arg_value
from kvferry.launch.state import StateDir

PLAIN = Engine("engine-0", "colocated", 8300, 0, 1, 0)
FRONTEND = ["--tool-call-parser=hermes", "--enable-auto-tool-choice", "--chat-template", "/t.jinja", "--block-size=32"]


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "gpus", lambda: 0)
    monkeypatch.setattr(rendering, "scale_out_is_a_flag", lambda: True)
    monkeypatch.delenv("KVFERRY_RENDER_COMMAND", raising=False)
    monkeypatch.delenv("KVFERRY_ENGINE_COMMAND", raising=False)


def _spec(**settings: Any) -> DeploymentSpec:
    spec = DeploymentSpec(**{"mode": "colocated", "render": 2, **settings})
    spec.check()
    return spec


def _engine(spec: DeploymentSpec) -> list[str]:
    return engines.command(spec, spec.check(), PLAIN, Path("/models/m"), [])


def _render(spec: DeploymentSpec) -> list[str]:
    return render_command(spec, Path("/models/m"), 8400, engines.default_max_model_len(spec))


def test_the_tier_is_given_what_all_engines_are_given() -> None:
    spec = _spec(vllm_args=[*FRONTEND, "--served-model-name", "x"], decode_args=["--tokens-only"], render_args=["--y"])
    line = _render(spec)
    assert line[1:8] == ["-m", "kvferry.cli", "render", "/models/m", "--workers", "2", "--host"]
    assert arg_value(line, "--port") == "8400" and arg_value(line, "--served-model-name") == "x"
    assert arg_value(line, "--max-model-len") == arg_value(_engine(spec), "--max-model-len") == "4096"
    assert line[-8:] == [*FRONTEND, "--served-model-name", "x", "--y"] and "--tokens-only" not in line


def test_what_makes_an_engine_an_engine_is_not_the_tiers() -> None:
    spec = _spec(vllm_args=["--tokens-only", "--skip_tokenizer_init", "--enable-scale-out", "--trust-remote-code"])
    line = _render(spec)
    assert line[-1] == "--trust-remote-code" and not set(rendering.ENGINE_ONLY) & set(line)
    assert "--skip_tokenizer_init" not in line


def test_engines_behind_a_tier_open_their_routes_and_tell_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _engine(_spec())
    assert "--enable-scale-out" in line and arg_value(line, "--middleware") == MIDDLEWARE
    without = _engine(_spec(render=0))
    assert "--enable-scale-out" not in without and "--middleware" not in without
    monkeypatch.setattr(rendering, "scale_out_is_a_flag", lambda: False)
    assert "--enable-scale-out" not in _engine(_spec())


def test_sim_engines_speak_a_models_tokenizer() -> None:
    spec = _spec(engine="sim", vllm_args=["--byte-scale=2", "--max-model-len=9000", "--api-key", "k"])
    assert arg_value(_engine(spec), "--tokenizer") == "smollm2"
    line = _render(spec)
    assert arg_value(line, "--max-model-len") == "9000" and arg_value(line, "--api-key") == "k"
    assert json.loads(arg_value(line, "--hf-overrides") or "") == {"max_position_embeddings": 9000}
    assert not any("byte-scale" in arg or "tokenizer" in arg for arg in line)
    assert arg_value(_render(_spec(engine="sim")), "--max-model-len") == "32768"
    own = _spec(engine="sim", vllm_args=["--tokenizer", "/models/t"])
    assert rendering.sim_tokenizer(own) == arg_value(_engine(own), "--tokenizer") == "/models/t"
    with pytest.raises(ConfigError, match="'builtin' with --render"):
        _engine(_spec(engine="sim", vllm_args=["--tokenizer=builtin"]))


def test_the_router_is_told_where_the_tier_is(tmp_path: Path) -> None:
    spec = _spec()
    line = router_command(spec, [PLAIN], spec.check(), 8000, StateDir(tmp_path), "http://127.0.0.1:8400")
    assert arg_value(line, "--render") == "http://127.0.0.1:8400"
    assert "--render" not in router_command(spec, [PLAIN], spec.check(), 8000, StateDir(tmp_path))


def test_environment_and_command_can_be_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_RENDER_COMMAND", "taskset -c 1 mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    spec = _spec(env={"TOKENIZERS_PARALLELISM": "true"})
    assert _render(spec)[:5] == ["taskset", "-c", "1", "mine", "/models/m"]
    env = render_environment(spec, engines.QUIET_ENV, tmp_path)
    assert (env["TMPDIR"], env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == (str(tmp_path), "3", "1")
    assert env["TOKENIZERS_PARALLELISM"] == "true"


def test_fewer_than_no_workers() -> None:
    with pytest.raises(ConfigError, match=r"render: -1 workers \(expected 0 or more"):
        _spec(render=-1)


def test_scale_out_is_looked_up_without_loading_vllm() -> None:
    code = (
        "import sys; from kvferry.launch.rendering import scale_out_is_a_flag as f; print(f(), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(importlib.util.find_spec("vllm") is not None), "False"]
