"""The command as a process, and addresses: rows C65 and C66 (the router's own port)."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket

import pytest
from router_process import router
from scripted import SOON, Engine, serving

from kvferry.errors import ConfigError
from kvferry.router import main
from kvferry.router.config import RouterConfig


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_v6(), reason="no IPv6 loopback on this machine")
async def test_c65_ipv6_end_to_end() -> None:
    engines = [Engine("prefill", "::1")], [Engine("decode", "::1")]
    async with serving(prefill=engines[0], decode=engines[1], host="::1") as pair:
        assert pair.url.startswith("http://[::1]:")
        assert (await pair.complete())[0] == 200
        assert (await pair.complete(stream=True))[0] == 200
        params = pair.d.calls[0].params
        assert (params["remote_host"], params["remote_port"]) == ("::1", pair.p.side.port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_starts_says_where_and_ends_cleanly(number: signal.Signals) -> None:
    async with router("--port", "0", "--decode", "127.0.0.1:9", "--mode", "colocated") as process:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("listening http://127.0.0.1:")
        process.send_signal(number)
        async with asyncio.timeout(SOON):
            rest, errors = await process.communicate()
        assert process.returncode == 0 and rest == b"" and b"Traceback" not in errors


async def test_c66_a_taken_port_is_one_line_and_exit_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with router("--port", str(port), "--decode", "127.0.0.1:9", "--mode", "colocated") as process:
            async with asyncio.timeout(10):
                out, errors = await process.communicate()
        lines = [line for line in errors.decode().splitlines() if line]
        assert process.returncode == 1 and out == b""
        assert len(lines) == 1 and str(port) in lines[0] and "--port" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "http://a:1"], "--prefill"),
        (["--prefill", "http://a:1"], "--decode"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--mode", "colocated"], "colocated"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "twice"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--connector", "upstream-push"], "engine_id"),
        (
            ["--prefill", "http://a:1", "--decode", "http://b:1", "--connector", "upstream-pull", "--mode", "stream"],
            "--mode: 'stream' with connector upstream-pull, which is always pull",
        ),
        (["--decode", "http://b:1", "--connector", "none", "--mode", "push"], "which is always colocated"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--session-ttl", "0"], "--session-ttl: 0"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--session-ttl", "inf"], "--session-ttl: inf"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--first-token", "prefill"], "--first-token: 'prefill'"),
        (["--prefill", "::1:8100", "--decode", "http://b:1"], "[::1]:8100"),
    ],
)
def test_settings_that_contradict_each_other(arguments: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    with pytest.raises(ConfigError) as caught:
        main.config_of(parser.parse_args(arguments))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (["--connector", "upstream-pull"], "pull"),
        (["--connector", "upstream-pull", "--mode", "pull"], "pull"),
        (["--connector", "upstream-push", "--mode", "push"], "push"),
        ([], "push"),
        (["--mode", "stream"], "stream"),
    ],
)
def test_a_connector_of_one_mode_needs_none_named(arguments: list[str], mode: str) -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    engines = ["--prefill", "http://a:1,engine_id=E", "--decode", "http://b:1"]
    assert main.config_of(parser.parse_args([*engines, *arguments])).mode == mode


def test_a_session_lives_as_long_as_it_is_told() -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    line = ["--prefill", "http://a:1", "--decode", "http://b:1", "--session-ttl", "60"]
    assert main.config_of(parser.parse_args(line)).session_ttl_s == 60


def test_defaults_of_the_command_are_those_of_the_config() -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    config = main.config_of(parser.parse_args(["--prefill", "http://a:1", "--decode", "http://b:1"]))
    assert config == RouterConfig(prefill=config.prefill, decode=config.decode)
