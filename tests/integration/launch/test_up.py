"""`kvferry up`, `down`, `status` with real processes; engines and router are stand-ins that start at once."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.errors import ConfigError
from kvferry.launch.deployment import Deployment
from kvferry.launch.process import ProcessDied
from kvferry.launch.spec import DeploymentSpec
from kvferry.launch.web import healthy

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_engine.py')}"
WITHIN_S = 45.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(0.02)


class Box:
    """One test's own folder, environment and port; knows every process that was started from it."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"kvferry-test-{uuid.uuid4().hex}"
        self.state_dir = folder / "state"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.env = {
            "KVFERRY_ENGINE_COMMAND": FAKE,
            "KVFERRY_ROUTER_COMMAND": FAKE,
            "KVFERRY_RENDER_COMMAND": FAKE,
            "KVFERRY_TEST_MARK": self.mark,
            "FAKE_SHM": self.mark,
            "TMPDIR": str(self.temporary),
        }
        self.started: list[subprocess.Popen[str]] = []

    def kvferry(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli", *arguments, "--state-dir", str(self.state_dir)],
            env={**os.environ, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def up(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.kvferry("up", "--model", str(self.model), "--port", str(self.port), *arguments, **env)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("KVFERRY_TEST_MARK") == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def shm(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"{self.mark}*")]

    def port_is_free(self) -> bool:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return sock.connect_ex(("127.0.0.1", self.port)) != 0

    def assert_empty(self) -> None:
        assert [(process.pid, process.cmdline()) for process in self.processes()] == []
        assert self.shm() == []
        assert list(self.temporary.iterdir()) == []
        assert self.port_is_free()
        assert not (self.state_dir / "state.json").exists()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for process in made.processes():
        process.kill()
    for started in made.started:
        started.kill()
        started.communicate()
    for name in made.shm():
        Path("/dev/shm", name).unlink()


def ready(process: subprocess.Popen[str]) -> str:
    """The ready line; fails with what was said instead."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], WITHIN_S)
    line = process.stdout.readline() if readable else ""
    if not line:
        process.kill()
        pytest.fail(f"no ready line; stderr: {process.communicate()[1]}")
    return line.strip()


def test_up_is_ready_serves_and_ends_on_ctrl_c(box: Box) -> None:
    process = box.up("--mode", "push", "--prefill", "2")
    assert ready(process) == f"ready http://127.0.0.1:{box.port}"
    assert healthy(f"http://127.0.0.1:{box.port}")
    told = box.kvferry("status", "--json")
    facts = json.loads(told.communicate(timeout=WITHIN_S)[0])
    assert told.returncode == 0
    assert (facts["running"], facts["phase"], facts["mode"]) == (True, "ready", "push")
    rows = {row["name"]: row for row in facts["processes"]}
    assert list(rows) == ["prefill-0", "prefill-1", "decode-0", "router"]
    assert all(row["alive"] and row["healthy"] and Path(row["log"]).exists() for row in rows.values())
    channels = {row["side_channel"] for name, row in rows.items() if name != "router"}
    assert len(channels) == 3
    assert len(box.shm()) == 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-2:] == ["stopping", "stopped"]
    box.assert_empty()


def test_a_render_tier_is_one_more_process(box: Box) -> None:
    process = box.up("--mode", "push", "--render", "2", FAKE_DELAY_S="0.3")
    ready(process)
    facts = json.loads(box.kvferry("status", "--json").communicate(timeout=WITHIN_S)[0])
    rows = {row["name"]: row for row in facts["processes"]}
    assert list(rows) == ["prefill-0", "decode-0", "render", "router"]
    assert rows["render"]["healthy"] and rows["render"]["role"] == "render" and Path(rows["render"]["log"]).exists()
    os.kill(rows["render"]["pid"], signal.SIGKILL)
    assert process.stderr is not None
    while "render was ended by SIGKILL while serving" not in process.stderr.readline():
        pass
    told = box.kvferry("status")
    assert told.wait(WITHIN_S) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    box.assert_empty()


def test_a_render_tier_that_cannot_start_is_named(box: Box) -> None:
    process = box.up("--render", "1", FAKE_DIES="ValueError: no such parser", FAKE_DIES_WHEN="--workers")
    _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1
    assert "render ended with exit code 3 while starting: ValueError: no such parser" in err
    box.assert_empty()


@pytest.mark.parametrize("seed", range(12))
def test_ctrl_c_at_any_moment_leaves_nothing(box: Box, seed: int) -> None:
    """The moment is drawn from the whole start-up: before the first process, between two, in the warm-up, after."""
    process = box.up("--mode", "push", FAKE_DELAY_S="0.3")
    time.sleep(random.Random(seed).uniform(0.0, 2.0))
    process.send_signal(random.Random(seed).choice([signal.SIGINT, signal.SIGTERM]))
    process.communicate(timeout=WITHIN_S)
    box.assert_empty()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
def test_ctrl_c_right_after_a_process_started_leaves_nothing(box: Box, name: str) -> None:
    process = box.up("--mode", "push", FAKE_DELAY_S="0.5")
    until((box.state_dir / "logs" / f"{name}.log").exists, f"log of {name}")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    box.assert_empty()


def test_ctrl_c_twice_ends_engines_that_do_not_listen_to_reason(box: Box) -> None:
    process = box.up("--mode", "push", FAKE_STUBBORN="1")
    ready(process)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while process.stderr.readline().strip() != "stopping":
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert time.monotonic() - begun < 8.0, "the second Ctrl-C cuts the ten seconds of grace short"
    box.assert_empty()


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_a_killed_launcher_takes_everything_along(box: Box, when: str) -> None:
    process = box.up("--mode", "push", FAKE_DELAY_S="0" if when == "ready" else "60")
    if when == "ready":
        ready(process)
    else:
        until(lambda: len(box.shm()) == 2, "both engines are up")
    process.kill()
    process.wait()
    until(lambda: not box.processes(), "no process is left")
    box.assert_empty()


def test_an_engine_that_dies_at_start_is_shown_and_ends_all(box: Box) -> None:
    process = box.up(
        "--mode", "push", FAKE_DELAY_S="60", FAKE_DIES="ValueError: no such layer", FAKE_DIES_WHEN="kv_consumer"
    )
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (1, "")
    assert "  loading weights\n  ValueError: no such layer\n" in err
    last = err.splitlines()[-1]
    assert last.startswith("kvferry: error: decode-0 ended with exit code 3 while starting: ValueError: no such layer")
    assert str(box.state_dir / "logs" / "decode-0.log") in last
    box.assert_empty()


def test_a_taken_router_port_is_said_before_anything_starts(box: Box) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", box.port))
        sock.listen()
        process = box.up("--mode", "push")
        _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1
    assert f"port {box.port} is taken by" in err
    box.assert_empty()


def test_detach_status_down_and_down_again(box: Box) -> None:
    process = box.up("--mode", "colocated", "--detach")
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (0, f"ready http://127.0.0.1:{box.port}\n")
    assert "engine-0: ready" in err
    assert healthy(f"http://127.0.0.1:{box.port}")
    second = box.up("--mode", "colocated")
    assert "in use by colocated" in second.communicate(timeout=WITHIN_S)[1]
    assert second.returncode == 1
    down = box.kvferry("down")
    assert down.communicate(timeout=WITHIN_S)[0] == f"stopped colocated at http://127.0.0.1:{box.port}\n"
    assert down.returncode == 0
    box.assert_empty()
    again = box.kvferry("down")
    assert again.communicate(timeout=WITHIN_S)[0] == f"nothing runs in {box.state_dir}\n"
    assert again.returncode == 0
    told = box.kvferry("status")
    assert told.communicate(timeout=WITHIN_S)[0] == f"nothing runs in {box.state_dir}\n"
    assert told.returncode == 1


def test_a_detached_launcher_whose_waiting_parent_is_killed_stops(box: Box) -> None:
    process = box.up("--mode", "push", "--detach", FAKE_DELAY_S="60")
    until(lambda: len(box.shm()) == 2, "both engines are up")
    process.kill()
    process.wait()
    until(lambda: not box.processes(), "no process is left")
    box.assert_empty()


def test_ctrl_c_while_waiting_for_a_detached_launcher(box: Box) -> None:
    process = box.up("--mode", "push", "--detach", FAKE_DELAY_S="60")
    until(lambda: len(box.shm()) == 2, "both engines are up")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    box.assert_empty()


def test_down_tidies_up_after_launcher_and_watchdog_were_killed(box: Box) -> None:
    process = box.up("--mode", "push")
    ready(process)
    guards = [other for other in box.processes() if "kvferry.launch.guard" in other.cmdline()]
    assert len(guards) == 1
    guards[0].kill()
    process.kill()
    process.wait()
    down = box.kvferry("down")
    assert "nothing runs in" in down.communicate(timeout=WITHIN_S)[0]
    assert box.processes() == []
    assert box.shm() == []


def test_deployment_kill_restart_and_failure(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in box.env.items():
        monkeypatch.setenv(name, value)
    spec = DeploymentSpec(mode="push", model=str(box.model), state_dir=box.state_dir)
    with Deployment(spec) as deployment:
        prefill, decode = deployment.engines
        assert (prefill.role, decode.role) == ("prefill", "decode")
        assert len(prefill.pids()) == 2
        before = prefill.pid
        deployment.kill("prefill-0")
        until(lambda: not prefill.pids(), "the engine's whole tree is gone")
        assert [process.name for process in deployment.dead()] == ["prefill-0"]
        assert not healthy(prefill.url)
        deployment.restart("prefill-0")
        assert prefill.pid != before and healthy(prefill.url)
        with pytest.raises(ConfigError, match="known: prefill-0, decode-0, router"):
            deployment.kill("nobody")
        os.kill(decode.pid, signal.SIGKILL)  # by somebody else: what it left in /dev/shm is known all the same
        until(lambda: len(deployment.dead()) == 1, "the death is seen")
    assert healthy(decode.url) is False
    box.assert_empty()
    monkeypatch.setenv("FAKE_DIES", "RuntimeError: boom")
    with pytest.raises(ProcessDied, match="RuntimeError: boom") as caught:
        Deployment(spec).start()
    assert "loading weights" in caught.value.tail
    box.assert_empty()
