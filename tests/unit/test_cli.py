from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import cli


def _exit_code(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_importing_the_cli_loads_no_heavy_module() -> None:
    heavy = ("torch", "vllm", "zmq", "numpy", "aiohttp", "transformers", "nixl", "nixl_cu12")
    code = (
        "import sys, kvferry.cli, kvferry.launch.commands, kvferry.launch.demo\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["upp"], 2, "did you mean 'up'?"),
        (["qqq"], 2, "known: up, down, status"),
        (["up", "--bogus"], 2, "unrecognized arguments: --bogus"),
        (["up", "--prefill", "many"], 2, "invalid int value: 'many'"),
        (["up", "--mode", "psuh"], 1, "did you mean 'push'?"),
        (["up", "--mode", "zzz"], 1, "known: colocated, pull, pull-inline, push, stream, upstream-pull, upstream-push"),
        (["up", "--engine", "vlm"], 1, "did you mean 'vllm'?"),
        (["up", "--prefill", "0"], 1, "needs at least 1"),
        (["up", "--decode", "0"], 1, "at least 1 is needed"),
        (["up", "--port", "70000"], 1, "port: 70000 is not a port"),
        (["up", "--vllm-arg=--port=1"], 1, "'--port=1' is set by kvferry itself"),
        (["up", "--mode", "colocated", "--prefill", "2"], 1, "mode 'colocated' takes no prefill engines"),
        (["up", "--bind", "late"], 1, "--bind: 'late' with mode 'push' (only --mode stream can bind later than early)"),
        (["up", "--mode", "pull", "--bind", "at=50"], 1, "--bind: 'at=50' with mode 'pull'"),
        (["up", "--mode", "stream", "--bind", "at=200"], 1, "--bind: 'at=200' (expected early, late or at=PERCENT"),
        (["up", "--mode", "stream", "--bind", "at=²"], 1, "--bind: 'at=²'"),
        (["router", "--bind", "late", "--decode", "a:1", "--prefill", "b:1"], 1, "--bind: 'late' with mode 'push'"),
        (
            ["router", "--bind", "late", "--connector", "upstream-pull", "--decode", "a:1"],
            1,
            "--bind: 'late' with connector 'upstream-pull'",
        ),
        (["router", "--mode", "pussh"], 1, "mode: unknown name 'pussh' (did you mean 'push'?)"),
        (
            ["router", "--prefill-policy", "sesion"],
            1,
            "--prefill-policy: unknown name 'sesion' (did you mean 'session'?)",
        ),
        (["router", "--slo-action", "shred"], 1, "--slo-action: unknown name 'shred' (did you mean 'shed'?)"),
        (["router", "--connector", "kvfery"], 1, "did you mean 'kvferry'?"),
        (["story", "abc", "--state-dir", "/nonexistent"], 1, "no story of transfer 'abc'"),
        (["story", "a,b", "--story-dir", "/nonexistent"], 1, "no story of transfer 'a', 'b' in /nonexistent"),
        (["story", ",", "--state-dir", "/nonexistent"], 1, "stories are off unless `story_dir` is set"),
    ],
)
def test_errors_are_one_line_with_a_hint(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvferry: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_no_command_shows_the_commands_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code() == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", ["up", "down", "status", "router", "story", "demo"])
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(name, "--help") == 0
    shown = capsys.readouterr().out
    assert "example:" in shown
    assert f"kvferry {name}" in shown.split("example:")[1]


def test_every_option_has_a_help_text() -> None:
    for command in cli.COMMANDS.values():
        add, _ = cli._resolve(command)
        parser = cli.Parser()
        add(parser)
        assert [action.dest for action in parser._actions if action.option_strings and not action.help] == [], (
            command.module
        )


def test_a_port_in_use_or_a_missing_model_leaves_the_last_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [tmp_path / "logs" / "decode-0.log", tmp_path / "story" / "decode-1.jsonl"]
    for path in kept:
        path.parent.mkdir()
        path.write_text("old")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        calls = (
            (["--port", port], f"port {port} is taken"),
            (["--port", "0", "--model", "nosuch"], "a folder with config.json works too"),
        )
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            for arguments, said in calls:
                assert _exit_code("up", "--state-dir", str(tmp_path), *arguments) == 1
                shown = capsys.readouterr().err
                assert shown.startswith("kvferry: error: ") and said in shown and shown.count("\n") == 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert [path.read_text() for path in kept] == ["old", "old"]
