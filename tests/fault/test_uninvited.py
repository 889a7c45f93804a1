"""Engines under the hands of those who have no key, and of one who has: they go on serving, and say who was refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from nixl_tier import free_port
from sim_tier import ask_all, asks, right, simulated
from wire_examples import EXAMPLES

from kvferry.auth import AuthKey, load_key, make_key_file
from kvferry.bench.witness import engine_metrics
from kvferry.cli import main
from kvferry.config import parse_address
from kvferry.errors import KeyRefused
from kvferry.launch.deployment import Deployment
from kvferry.protocol import codec
from kvferry.transfer import inquiry
from kvferry.transfer.curve import dial_with

pytest.importorskip("nixl_cu12")
pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]
WITHIN_S = 20.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with simulated(tmp_path_factory.mktemp("pair")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrong") / "wrong.key"
    make_key_file(path)
    return path


def side(pair: Deployment, name: str) -> tuple[str, int]:
    return parse_address(pair.engine(name).side_channel, "side channel")


def key_of(pair: Deployment) -> AuthKey:
    key = load_key(str(pair.state_dir.auth_key))
    assert key is not None
    return key


async def serves(pair: Deployment, seed: int) -> None:
    what = asks(30, seed)
    got = await ask_all(pair.router_url, pair.model_name(), what)
    assert [one.tokens for one in got] == [right(ask) for ask in what], [one.body for one in got if one.status != 200]


def refusals(pair: Deployment, name: str) -> dict[str, float]:
    rows, wanted = engine_metrics(pair.engine(name).url), "kvferry:side_channel_refusals_total"
    return {labels["reason"]: value for sample, labels, value in rows if sample == wanted}


async def test_up_makes_the_key_and_all_have_it(pair: Deployment) -> None:
    key = key_of(pair)
    assert pair.state_dir.auth_key.stat().st_mode & 0o777 == 0o600
    for name in ("prefill-0", "decode-0"):
        assert (await inquiry.describe(*side(pair, name), key=key)).engine_id == name
        log = pair.engine(name).log.read_text()
        assert f"key {key.name} from" in log and key.text not in log and "loopback only" not in log
    await serves(pair, 1)


@pytest.mark.parametrize("known", ["another key", "no key"])
async def test_who_asks_without_the_key_learns_why_at_once(pair: Deployment, wrong: Path, known: str) -> None:
    key = load_key(str(wrong)) if known == "another key" else None
    for name in ("prefill-0", "decode-0"):
        started = time.monotonic()
        with pytest.raises(KeyRefused, match=r"this side has (none|key)") as raised:
            await inquiry.abandon(*side(pair, name), "any", "x", key=key)  # type: ignore[arg-type]
        assert time.monotonic() - started < 2.0 and raised.value.code == "wrong_key"
    await serves(pair, 2)
    seen = refusals(pair, "prefill-0")
    assert seen.get("wrong_key", 0) + seen.get("no_handshake", 0) >= 2


async def test_noise_on_the_ports(pair: Deployment) -> None:
    """Bytes that are nothing, greetings that stop half-way, hundreds of connections that stay and say no word."""
    draw, raws = random.Random(5), []
    beginnings = (b"", b"\xff", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47), b"GET / HTTP/1.1\r\n\r\n")
    for _ in range(150):
        for name in ("prefill-0", "decode-0"):
            raw = socket.create_connection(side(pair, name))
            raw.sendall(draw.choice(beginnings) + draw.randbytes(draw.choice([0, 5, 200, 5000])))
            raws.append(raw)
            if draw.random() < 0.5:
                raws.pop().close()
    await serves(pair, 3)
    for raw in raws:
        raw.close()
    await serves(pair, 4)


async def test_garbage_from_one_who_has_the_key(pair: Deployment) -> None:
    draw, context, dealers = random.Random(6), zmq.Context(), []
    for name in ("prefill-0", "decode-0"):
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.linger = 0
        dial_with(dealer, key_of(pair))
        dealer.connect(inquiry.endpoint(*side(pair, name)))
        for message in EXAMPLES:
            data = bytearray(codec.encode(message))
            dealer.send(bytes(data))
            for _ in range(5):
                data[draw.randrange(len(data))] = draw.randrange(256)
                dealer.send(bytes(data))
        dealer.send(draw.randbytes(1000))
        dealer.send_multipart([b"a"] * 50)
        dealer.send(bytes(codec.MAX_BYTES + 1))
        dealer.send(codec.encode(EXAMPLES[0])[:-1] * 2)
    for _ in range(2):
        await serves(pair, 7)
    for name in ("prefill-0", "decode-0"):
        due = time.monotonic() + 20
        while "oversized" not in (seen := refusals(pair, name)) and time.monotonic() < due:
            await asyncio.sleep(0.2)  # it was the last but one, and may still be on its way
        assert seen["malformed"] > 50 and seen["oversized"] == 1 and seen["not_greeted"] >= 5, seen
        assert pair.engine(name).process.running()
    for dealer in dealers:
        dealer.close()  # only now: a socket that is closed with answers unread takes back what it sent last
    context.term()


def start(*args: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        line = [sys.executable, "-m", "kvferry.cli", *args]
        return subprocess.Popen(line, stdout=out, stderr=out, env={**os.environ, "UCX_TLS": "tcp,self,sm"})


def post(url: str, body: dict[str, object]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def await_line(log: Path, text: str) -> str:
    until = time.monotonic() + WITHIN_S
    while True:
        found = [line for line in log.read_text().splitlines() if text in line]
        if found:
            return found[0]
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


async def test_an_engine_with_another_key_fails_its_requests_fast_and_by_name(
    pair: Deployment, wrong: Path, tmp_path: Path
) -> None:
    host, port = side(pair, "prefill-0")
    mine, http = free_port(), free_port()
    extra = {"side_channel_port": mine, "auth_key_file": str(wrong), "peers": [f"{host}:{port}"]}
    config = {"kv_role": "kv_consumer", "engine_id": "intruder", "kv_connector_extra_config": extra}
    log = tmp_path / "log"
    intruder = start("engine", "--port", str(http), "--kv-transfer-config", json.dumps(config), log=log)
    try:
        await_line(log, "listening")
        assert "it has another key" in await_line(log, "ends the handshake")
        params = {"do_remote_prefill": True, "transfer_id": "theft", "remote_host": host, "remote_port": port}
        body: dict[str, object] = {"model": "instant", "prompt": list(range(300, 350)), "kv_transfer_params": params}
        started = time.monotonic()
        status, said = await asyncio.to_thread(post, f"http://127.0.0.1:{http}/v1/completions", body)
        assert status >= 500 and time.monotonic() - started < 3.0, said
        verdict = await inquiry.why("127.0.0.1", mine, "theft", key=load_key(str(wrong)))  # type: ignore[arg-type]
        assert (verdict.state, verdict.code) == ("failed", "wrong_key") and "another key" in verdict.reason
    finally:
        intruder.terminate()
        assert intruder.wait(20) == 0
    await serves(pair, 8)
    assert refusals(pair, "prefill-0")["wrong_key"] >= 2
    lines = [line for line in pair.engine("prefill-0").log.read_text().splitlines() if "wrong_key" in line]
    assert lines and "another key, or with none" in lines[0]


def test_a_router_with_another_key_is_not_ready_and_says_why(pair: Deployment, wrong: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    specs = ["--prefill", pair.engine("prefill-0").plan.router_spec()]
    specs += ["--decode", pair.engine("decode-0").plan.router_spec()]
    router = start("router", "--port", str(port), "--auth-key-file", str(wrong), *specs, log=log)
    try:
        assert "another key" in await_line(log, "prefill engine http")
        status, said = post(f"http://127.0.0.1:{port}/v1/completions", {"model": "instant", "prompt": "x"})
        assert status == 503 and "another key" in said and "auth_key_file" in said
    finally:
        router.terminate()
        router.wait(20)


def test_the_doctor_finds_a_key_that_is_another(
    pair: Deployment, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--prefill", pair.engine("prefill-0").side_channel, "--decode", pair.engine("decode-0").side_channel]
    assert main(["doctor", *where, "--auth-key-file", str(wrong)]) == 2
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in found] == ["key", "key"] and "another key" in found[0]
    assert main(["doctor", *where, "--auth-key-file", "/nowhere/k"]) == 2
    assert "auth_key_file: /nowhere/k: No such file" in capsys.readouterr().err


def test_beyond_loopback_an_engine_without_a_key_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFERRY_AUTH_KEY_FILE", raising=False)
    monkeypatch.delenv("KVFERRY_AUTH_KEY", raising=False)
    extra = {"side_channel_host": "0.0.0.0", "side_channel_port": free_port()}
    config = {"kv_role": "kv_producer", "kv_connector_extra_config": extra}
    log = tmp_path / "log"
    engine = start("engine", "--port", "0", "--kv-transfer-config", json.dumps(config), log=log)
    assert engine.wait(20) == 1
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("kvferry: error")]
    assert "binds to loopback only" in line and "openssl rand" in line
