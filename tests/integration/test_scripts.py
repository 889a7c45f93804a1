"""The scripts with the published names, over stand-ins: no real engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench_parts import tiny_model
from golden import Golden

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
FAKE = f"{sys.executable} {ROOT / 'tests' / 'integration' / 'launch' / 'fake_engine.py'}"
WITHIN_S = 45.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Box:
    """One test's environment; knows every process that was started in it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.mark = f"kvferry-test-{os.getpid()}-{time.monotonic_ns()}"
        self.env = {
            **{name: value for name, value in os.environ.items() if name not in ("MODE", "ROLE", "KVFERRY_TREE")},
            "PYTHON": sys.executable,
            "RUN_DIR": str(self.run_dir),
            "KVFERRY_TEST_MARK": self.mark,
            "KVFERRY_ENGINE_COMMAND": FAKE,
        }

    def start(self, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
        line = ["sh", str(SCRIPTS / script), *args]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env={**self.env, **env}, stdout=pipe, stderr=pipe, text=True)

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *args, **env)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("KVFERRY_TEST_MARK") == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait_for(port: int) -> None:
    until = time.monotonic() + WITHIN_S
    while not answers(port):
        assert time.monotonic() < until
        time.sleep(0.05)


def command_of(box: Box, port: int) -> list[str]:
    return next(p.cmdline() for p in box.processes() if "--port" in p.cmdline() and str(port) in p.cmdline())


@pytest.mark.parametrize(
    ("role", "kv_role", "port"), [("prefill", "kv_producer", "8100"), ("decode", "kv_consumer", "8200")]
)
def test_a_server_gets_the_published_settings(box: Box, tmp_path: Path, role: str, kv_role: str, port: str) -> None:
    """The command line that would run, told by a stand-in that only tells."""
    teller = tmp_path / "teller.py"
    teller.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    done = box.run(
        "serve_pd.sh",
        "--dtype",
        "bfloat16",
        **{"PREFILL_IP": "10.0.0.1", "DECODE_IP": "10.0.0.2", "ROLE": role, "MODE": "pull", "MODEL": "/models/m"},
        **{"STORY_DIR": '/tmp/my "story"', "KVFERRY_ENGINE_COMMAND": f"{sys.executable} {teller}"},
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line[line.index("--port") + 1] == port
    assert line[line.index("--model") + 1] == "/models/m"
    assert "--no-enable-prefix-caching" in line
    assert line[-2:] == ["--dtype", "bfloat16"]
    config = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("KVFerryConnector", "kvferry.connector")
    assert config["kv_role"] == kv_role
    extra = config["kv_connector_extra_config"]
    assert extra["mode"] == "pull"
    assert extra["side_channel_host"] == ("10.0.0.1" if role == "prefill" else "10.0.0.2")
    assert extra["side_channel_port"] == 5600
    assert extra.get("peers") == (None if role == "prefill" else ["10.0.0.1:5600"])
    assert extra["story_dir"] == '/tmp/my "story"'


def test_the_connector_takes_what_the_script_says(box: Box, tmp_path: Path) -> None:
    from kvferry.config import connector_config

    teller = tmp_path / "teller.py"
    teller.write_text("import sys\nprint(sys.argv[sys.argv.index('--kv-transfer-config') + 1])\n")
    done = box.run(
        "serve_pd.sh",
        **{"PREFILL_IP": "10.0.0.1", "DECODE_IP": "10.0.0.2", "ROLE": "decode", "MODE": "push", "MODEL": "m"},
        **{"KVFERRY_ENGINE_COMMAND": f"{sys.executable} {teller}", "PREFILL_SIDE_CHANNEL_PORT": "5700"},
    )
    config = connector_config(json.loads(done.stdout)["kv_connector_extra_config"])
    assert (config.mode, config.peers) == ("push", ("10.0.0.1:5700",))


@pytest.mark.parametrize(
    ("script", "args", "env", "said"),
    [
        ("serve_pd.sh", [], {}, "PREFILL_IP is not set: the prefill machine's address"),
        (
            "serve_pd.sh",
            [],
            {"PREFILL_IP": "a", "DECODE_IP": "b", "MODEL": "m"},
            "ROLE: '' is not one of: prefill decode",
        ),
        (
            "serve_pd.sh",
            [],
            {"PREFILL_IP": "a", "DECODE_IP": "b", "MODEL": "m", "ROLE": "decode", "MODE": "psh"},
            "MODE: 'psh' is not one of: pull push",
        ),
        (
            "serve_pd.sh",
            [],
            {"PREFILL_IP": "a", "DECODE_IP": "b", "MODEL": "m", "ROLE": "decode", "SIDE_CHANNEL_PORT": "x"},
            "SIDE_CHANNEL_PORT: 'x' is not a port number",
        ),
        ("run_sweep.sh", [], {}, "MODE: '' is not one of: pull push"),
        ("run_sweep.sh", [], {"MODE": "push"}, "MODEL is not set"),
        ("run_sweep.sh", [], {"MODE": "push", "MODEL": "m"}, "PREFILL_IP is not set"),
        ("run_sweep.sh", [], {"MODE": "push", "MODEL": "m", "PREFILL_PP_SIZE": "2"}, "PREFILL_PP_SIZE: '2'"),
        ("cleanup.sh", [], {}, "say what to end: proxy or server"),
        ("cleanup.sh", ["sever"], {}, "what to end: 'sever' is not one of: proxy server"),
    ],
)
def test_mistakes_are_one_line(box: Box, script: str, args: list[str], env: dict[str, str], said: str) -> None:
    done = box.run(script, *args, **env)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script}: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert box.processes() == []


def test_cleanup_ends_a_server_with_all_its_processes_and_nothing_else(box: Box) -> None:
    ports = {"prefill": free_port(), "decode": free_port()}
    common = {"PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1", "MODEL": "m"}
    servers = [box.start("serve_pd.sh", ROLE=role, PORT=str(port), **common) for role, port in ports.items()]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for port in ports.values():
        wait_for(port)
    assert len(box.processes()) == 4, "each has a child in a session of its own"
    done = box.run("cleanup.sh", "server")
    assert (done.returncode, done.stdout) == (0, "ended: server-decode, server-prefill\n"), done.stderr
    for server in servers:
        server.communicate(timeout=WITHIN_S)
    assert box.processes() == []
    assert bystander.poll() is None
    again = box.run("cleanup.sh", "server")
    assert (again.returncode, again.stdout) == (0, "no server runs\n")
    bystander.kill()
    bystander.wait()


def test_cleanup_leaves_a_process_alone_that_only_has_the_pid(box: Box) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    box.run_dir.mkdir()
    (box.run_dir / "server-prefill").write_text(f"{other.pid} 12345.0 0123456789abcdef\n")
    done = box.run("cleanup.sh", "server")
    assert (done.returncode, done.stdout) == (0, "no server runs\n")
    assert other.poll() is None
    other.kill()
    other.wait()


def test_cleanup_names_a_note_that_it_cannot_read_and_ends_the_others(box: Box) -> None:
    port = free_port()
    server = box.start(
        "serve_pd.sh",
        **{"ROLE": "prefill", "PORT": str(port), "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1", "MODEL": "m"},
    )
    wait_for(port)
    (box.run_dir / "server-a").write_text("12")
    done = box.run("cleanup.sh", "server")
    assert done.returncode == 1
    assert done.stderr.startswith("cleanup.sh: error: damaged: ") and "server-a" in done.stderr
    assert done.stderr.count("\n") == 1
    server.communicate(timeout=WITHIN_S)
    assert box.processes() == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def test_a_sweep_over_a_router_that_runs(box: Box, tmp_path: Path, model: Path) -> None:
    story = tmp_path / "story"
    story.mkdir()
    with Golden(first_ms=(30.0,), gaps_ms=(5.0,), story_dir=story, kv_bytes=64) as server:
        done = box.run(
            "run_sweep.sh",
            *("--load", "builtin", "--kv-bytes", "64", "--block-size", "16"),
            **{"MODE": "push", "MODEL": str(model), "ROUTER_URL": server.url, "STORY_DIR": str(story)},
            **{"QPS_LIST": "4 5", "INPUT_LENS": "40,80", "OUTPUT_LENS": "4", "NUM": "3"},
            RESULTS=str(tmp_path / "results"),
        )
    assert done.returncode == 0, done.stderr
    names = {path.stem for path in (tmp_path / "results").glob("*.json")}
    assert names == {f"push_qps{q}_in{length}_out4_iter1" for q in (4, 5) for length in (40, 80)}
    drawn = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "plot_push_vs_pull.py"),
            "--results-dir",
            str(tmp_path / "results"),
            "--metric",
            "ttft",
            "--output-len",
            "4",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "results" / "push_vs_pull_ttft.png").read_bytes()[:4] == b"\x89PNG"


def test_a_port_on_which_something_listens_is_not_taken_for_our_router(box: Box, model: Path) -> None:
    """Else a router that was left over, of another mode or other engines, would be measured."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        done = box.run(
            "run_sweep.sh",
            **{"MODE": "push", "MODEL": str(model), "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1"},
            ROUTER_PORT=port,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"run_sweep.sh: error: ROUTER_PORT: {port} can't be used")
    assert not (box.run_dir / "proxy").exists()


def test_a_router_that_ends_at_once_is_told_with_its_reason(box: Box, model: Path) -> None:
    done = box.run(
        "run_sweep.sh",
        **{"MODE": "push", "MODEL": str(model), "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1"},
        **{"ROUTER_PORT": str(free_port()), "PREFILL_TP_SIZE": "x"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("run_sweep.sh: error: the router is not ready: it ended: kvferry")
    assert "tp" in done.stderr and "; its log: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert box.processes() == []


def test_the_router_is_started_with_the_prefill_settings_and_ended(box: Box, tmp_path: Path, model: Path) -> None:
    """Engines that are not there: the router says so, and is gone afterwards."""
    port = free_port()
    process = box.start(
        "run_sweep.sh",
        **{"MODE": "push", "MODEL": str(model), "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1"},
        **{"PREFILL_PORT": str(free_port()), "DECODE_PORT": str(free_port()), "ROUTER_PORT": str(port)},
        **{"PREFILL_ENGINE_ID": "p7", "PREFILL_KV_HOST": "127.0.0.2", "PREFILL_SIDE_CHANNEL_PORT": "5701"},
        PREFILL_TP_SIZE="4",
    )
    wait_for(port)
    line = " ".join(command_of(box, port))
    assert "side_channel=127.0.0.2:5701,engine_id=p7,tp=4" in line
    assert "--mode push" in line
    done = box.run("cleanup.sh", "proxy")
    assert done.stdout == "ended: proxy\n", done.stderr
    _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1
    assert "the router is not ready: it ended: " in err
    assert box.processes() == []


def test_first_token_by_turns() -> None:
    line = [sys.executable, str(SCRIPTS / "first_token.py"), "--mode", "stream", "--rounds", "1", "--num", "2"]
    more = ["--tokens", "40", "--profile", "instant", "--byte-scale", "1"]
    done = subprocess.run([*line, *more], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, equal = done.stdout.splitlines()
    assert first.startswith("stream, first token by decode: TTFT ") and equal == "answers: equal"
    assert second.startswith("stream, first token by prefill: TTFT ")
