"""`kvferry engine` as a process, with its real loop: it serves, it stops, and it says in one line why it doesn't."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry import cli
from kvferry.engine import main
from kvferry.engine.config import EngineConfig
from kvferry.engine.loop import EngineLoop
from kvferry.engine.profile import load
from kvferry.engine.request import Output
from kvferry.engine.text import Builtin

ENGINE = (sys.executable, "-m", "kvferry.cli", "engine")
SOON = 30


class Process:
    def __init__(self, *arguments: str) -> None:
        self._child = subprocess.Popen(
            [*ENGINE, "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line.startswith("listening "):
            self._child.kill()
            pytest.fail(f"did not start: {self._child.communicate()[1]}")
        self.url = line.split()[1]

    def ask(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SOON) as response:
            return str(response.read().decode())

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        self._child.send_signal(number)
        said = self._child.communicate(timeout=SOON)[1]
        return self._child.returncode, said

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops(start: Callable[..., Process], number: signal.Signals) -> None:
    process = start("--profile", "instant", "--max-model-len", "512", "--served-model-name", "toy", "also-toy")
    cards = json.loads(process.ask("/v1/models"))["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("toy", 512), ("also-toy", 512)]
    body = {"model": "also-toy", "prompt": [300] * 40, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    whole = json.loads(process.ask("/v1/completions", body))
    assert whole["usage"]["completion_tokens"] == 20
    events = process.ask("/v1/completions", body | {"stream": True}).split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [token_id for piece in pieces for token_id in piece["token_ids"]] == whole["choices"][0]["token_ids"]
    metrics = process.ask("/metrics")
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"} 2.0' in metrics
    assert 'vllm:generation_tokens_total{engine="0",model_name="toy"} 40.0' in metrics
    assert process.stop(number) == (0, "")


def test_it_stops_with_a_stream_under_way(start: Callable[..., Process]) -> None:
    process = start("--profile", "llama-8b-l40s", "--byte-scale", "64", "--num-gpu-blocks-override", "64",
                    "--max-model-len", "1024")  # fmt: skip
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(process.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SOON) as response:
        assert response.readline().startswith(b"data: {")
        assert process.stop(signal.SIGTERM) == (0, "")


def test_it_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, kvferry.engine.main, kvferry.engine.text\n"
        "kvferry.engine.text.open_tokenizer('builtin', 1000)\n"
        "print([name for name in ('torch', 'vllm', 'transformers', 'tokenizers', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


ROLELESS = '{"kv_connector": "KVFerryConnector"}'


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-modl-len", "9"], 2, "unrecognized arguments: --max-modl-len 9, did you mean --max-model-len?"),
        (["--port", "70000"], 1, "port: 70000 is not a port"),
        (["--profile", "insant"], 1, "did you mean 'instant'?"),
        (["--tokenizer", "smolm2"], 1, "did you mean 'smollm2'?"),
        (["--device", "gpu"], 1, "device: unknown 'gpu' (expected cpu, cuda or cuda:N)"),
        (["--kv-transfer-config", "{"], 1, "kv_transfer_config: '{' is not JSON"),
        (["--kv-transfer-config", "[]"], 1, "expected a JSON object"),
        (["--kv-transfer-config", ROLELESS], 1, "kv_role: None (expected one of kv_producer, kv_consumer, kv_both)"),
        (["--kv-transfer-config", '{"kv_rol": "kv_both"}'], 1, "did you mean 'kv_role'?"),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], 1, "'NixlConnector' is not served here"),
        (["--max-model-len", "0"], 1, "max_model_len: 0"),
        (["--byte-scale", "3"], 1, "byte_scale: 3"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1 port 8000"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = cli.main(["engine", *arguments])
    except SystemExit as stop:
        got = int(stop.code or 0)
    captured = capsys.readouterr()
    assert (got, captured.out) == (code, "")
    assert captured.err.startswith("kvferry: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*ENGINE, "--port", str(port)], capture_output=True, text=True, timeout=SOON, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"kvferry: error: cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert done.stderr.count("\n") == 1


class Dying(EngineLoop):
    """Dies when the first request comes, as the real one would of a bug."""

    def __init__(self, config: EngineConfig, deliver: Callable[[list[Output]], None]) -> None:
        super().__init__(config, deliver)
        self.closed = threading.Event()

    def add(self, request: Any) -> None:
        self.death = RuntimeError("boom")

    def close(self) -> None:
        super().close()
        self.closed.set()


async def test_a_dead_engine_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[Dying] = []

    def make(config: EngineConfig, deliver: Callable[[list[Output]], None], moved: Callable[..., None]) -> Dying:
        loops.append(Dying(config, deliver))
        return loops[-1]

    monkeypatch.setattr(main, "EngineLoop", make)
    parser = cli.Parser()
    main.add_arguments(parser)
    tokenizer = Builtin(32000)
    engine, config = main.configs_of(parser.parse_args([]), load("instant"), tokenizer)
    listener = main.bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(main.serve(engine, config, tokenizer, listener))
    body = b'{"prompt":"x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    while not serving.done():
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
    writer.write(head % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), SOON)
    writer.close()
    assert b" 500 Internal Server Error\r\n" in answer
    assert b"the engine died: boom" in answer
    with pytest.raises(main.EngineDied, match="the engine thread died: RuntimeError: boom"):
        await asyncio.wait_for(serving, SOON)
    assert loops[0].closed.is_set()


def test_settings_win_over_the_profile() -> None:
    parser = cli.Parser()
    main.add_arguments(parser)
    transfer = {"kv_role": "kv_producer", "engine_id": "p0"}
    arguments = ["--model", "m", "--tp", "2", "--block-size", "32", "--num-gpu-blocks-override", "99",
                 "--max-num-seqs", "5", "--max-num-batched-tokens", "77", "--max-model-len", "100",
                 "--no-enable-prefix-caching", "--device", "cuda", "--fragmentation", "0.5", "--dtype", "bfloat16",
                 "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
    engine, server = main.configs_of(parser.parse_args(arguments), load("instant"), Builtin(600))
    assert (engine.served_model_name, server.names) == ("m", ("m",))
    assert (engine.tp, engine.block_size, engine.num_blocks, engine.max_num_seqs) == (2, 32, 99, 5)
    assert (engine.max_num_batched_tokens, engine.max_model_len, engine.vocab_size) == (77, 100, 600)
    assert (engine.enable_prefix_caching, engine.device, engine.fragmentation) == (False, "cuda:0", 0.5)
    assert engine.kv_transfer == transfer
    plain, server = main.configs_of(parser.parse_args([]), load("instant"), Builtin(32000))
    assert (plain.num_blocks, plain.max_model_len, server.names) == (8192, 32768, ("instant",))
    assert plain.kv_transfer is None
