"""Arguments of vLLM's that a render worker can't follow are refused, whatever version has them."""

from __future__ import annotations

import argparse

import pytest

from kvferry.errors import ConfigError
from kvferry.render.compat import LISTENING, refuse_listening


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    for name in ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-ciphers", "--uds"):
        made.add_argument(name)
    made.add_argument("--ssl-cert-reqs", type=int, default=0)
    made.add_argument("--enable-ssl-refresh", action=argparse.BooleanOptionalAction, default=False)
    return made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--ssl-certfile", "a.pem"], ["--ssl-certfile", "'a.pem'", "router"]),
        (["--ssl-keyfile=a.key"], ["--ssl-keyfile", "router"]),
        (["--ssl-cert-reqs", "2"], ["--ssl-cert-reqs", "2"]),
        (["--enable-ssl-refresh"], ["--enable-ssl-refresh"]),
        (["--uds", "/run/x.sock"], ["--uds", "--host", "--port"]),
    ],
)
def test_tls_and_sockets_of_files_are_refused(line: list[str], words: list[str]) -> None:
    made = parser()
    with pytest.raises(ConfigError) as refused:
        refuse_listening(made.parse_args(line), made.get_default)
    assert all(word in str(refused.value) for word in words)


def test_defaults_and_versions_without_them_are_not() -> None:
    made = parser()
    refuse_listening(made.parse_args(["--ssl-cert-reqs", "0", "--no-enable-ssl-refresh"]), made.get_default)
    refuse_listening(argparse.Namespace(), argparse.ArgumentParser().get_default)
    assert set(vars(made.parse_args([]))) == set(LISTENING)
