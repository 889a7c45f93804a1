"""Engines from a file, a name and a Kubernetes service: who comes is probed and used, who goes is drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted import Engine, Pair, serving, streams_on

from kvferry.errors import ConfigError, KVFerryError, PeerUnreachable
from kvferry.router.engines import discover_file
from kvferry.router.engines.discover_dns import DnsSource
from kvferry.router.engines.discover_file import FileSource, read_engines
from kvferry.router.engines.discover_k8s import KubernetesSource, engines_of
from kvferry.router.engines.discovery import source_of
from kvferry.router.engines.found import SourceOptions
from kvferry.router.spec import parse_spec


def spec_text(engine: Engine) -> str:
    return f"{engine.url},side_channel={engine.host}:{engine.side.port}"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


def replace(path: Path, content: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    os.replace(fresh, path)


def urls(pair: Pair, role: str) -> list[str]:
    return [engine.url for engine in pair.running.pool.engines[role]]  # type: ignore[index]


async def test_a_file_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discover_file, "POLL_S", 0.02)
    monkeypatch.setattr(FileSource.__init__, "__defaults__", (0.02,))
    monkeypatch.setattr("kvferry.router.engines.discovery.AGAIN_S", 0.02)
    prefill, one, two = Engine("prefill"), Engine("decode"), Engine("decode")
    for engine in (prefill, one, two):
        await engine.start()
    path = tmp_path / "engines.yaml"
    listed = "prefill:\n  - {}\ndecode:\n  - url: {}\n    side_channel: 127.0.0.1:{}\n"
    path.write_text(listed.format(spec_text(prefill), one.url, one.side.port))
    async with serving(prefill=[], decode=[], discover=(f"file:{path}",), ready=False) as pair:
        try:
            await until(lambda: not pair.running.pool.missing())
            assert (await pair.complete())[0] == 200 and len(one.calls) == 1
            replace(path, listed.format(spec_text(prefill), two.url, two.side.port))
            await until(lambda: urls(pair, "decode") == [two.url] and not pair.running.pool.missing())
            assert (await pair.complete())[0] == 200 and len(two.calls) == 1
            replace(path, "decode: [")
            await until(lambda: "not YAML" in caplog.text)
            replace(path, "decod: []")
            await until(lambda: "did you mean 'decode'?" in caplog.text)
            assert urls(pair, "decode") == [two.url] and urls(pair, "prefill") == [prefill.url]
            assert (await pair.complete())[0] == 200, "a bad file changes nothing"
            assert caplog.text.count("not YAML") == 1, "and is told once"
            path.unlink()
            await until(lambda: "No such file" in caplog.text)
            replace(path, listed.format(spec_text(prefill), one.url, one.side.port) + f"  - {spec_text(two)}\n")
            await until(lambda: sorted(urls(pair, "decode")) == sorted([one.url, two.url]))
            async with pair.session.get(pair.url + "/metrics") as response:
                assert f'discoveries_total{{outcome="failed",source="file:{path}"}}' in await response.text()
        finally:
            for engine in (prefill, one, two):
                await engine.stop()


async def test_who_is_gone_from_a_source_is_drained_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSource.__init__, "__defaults__", (0.02,))
    extra = Engine("decode")
    await extra.start()
    path = tmp_path / "engines.json"
    path.write_text(json.dumps({"decode": [spec_text(extra)]}))
    async with serving(discover=(f"file:{path}",)) as pair:
        try:
            pool, gate = pair.running.pool, asyncio.Event()
            await until(lambda: len(pool.all()) == 3 and all(engine.ready for engine in pool.all()))
            asked = await streams_on(pair, extra, 1, gate)
            replace(path, "{}")
            await until(lambda: any(engine.leaving for engine in pool.all()))
            replace(path, json.dumps({"decode": [spec_text(extra)]}))
            await until(lambda: not any(engine.leaving for engine in pool.all()))
            assert extra.url in urls(pair, "decode"), "it came back before it was gone"
            replace(path, "{}")
            await until(lambda: any(engine.leaving for engine in pool.all()))
            gate.set()
            await until(lambda: urls(pair, "decode") == [pair.d.url])
            assert all(raw.endswith(b"data: [DONE]\n\n") for _, _, raw in await asyncio.gather(*asked))
        finally:
            gate.set()
            await extra.stop()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected a list of engines"),
        ({"decode": "http://d"}, "decode: expected a list"),
        ({"decode": [3]}, "decode[0]: no engine: int '3'"),
        ({"decode": [{"side_channel": "h:1"}]}, "with `url`"),
        ({"decode": [{"url": "http://d:1", "sidechannel": "h:1"}]}, "did you mean 'side_channel'"),
        ({"decode": [{"url": "http://d:1", "tp": True}]}, "tp: expected text or a number"),
        ({"decode": ["http://d:1", "http://d:1"]}, "named twice"),
        ({"decode": ["http://d:1"], "prefill": ["http://d:1"]}, "named twice"),
        ({"decode": ["::1:8100"]}, "decode[0]: engine '::1:8100': IPv6"),
    ],
)
def test_bad_files(content: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_engines("engines.yaml", content)
    assert said in str(caught.value) and str(caught.value).startswith("engines.yaml")


def test_the_three_kinds_of_file_say_the_same(tmp_path: Path) -> None:
    texts = {
        "a.yaml": "decode:\n- http://d:1\n- url: http://e:2\n  side_channel: k:7\n  tp: 2\n",
        "a.json": '{"decode": ["http://d:1", {"url": "http://e:2", "side_channel": "k:7", "tp": 2}]}',
        "a.toml": 'decode = ["http://d:1", {url = "http://e:2", side_channel = "k:7", tp = 2}]',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found = FileSource("file", str(tmp_path / name))._read()
        specs = (parse_spec("http://d:1"), parse_spec("http://e:2,side_channel=k:7,tp=2"))
        assert found == {"prefill": (), "decode": specs}, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fil:x", "did you mean 'file'"),
        ("file:", "nothing after 'file'"),
        ("file:/nowhere/engines.yaml", "No such file"),
        ("decode=file:x.yaml", "names roles"),
        ("dns:name:8000", "prefill=dns:name:8000 or decode=dns:name:8000"),
        ("decode=dns:name", "HOST:PORT"),
        ("decode=dns:name:8000,side_port=1", "did you mean 'side_channel_port'"),
        ("decode=dns:name:8000,tp=two", "tp"),
        ("decode=dns:name:8000,scheme=ftp", "http or https"),
        ("decode=dns:name:8000,interval_s=0", "interval_s above 0"),
        ("decode=k8s:service:8000", "NAMESPACE/SERVICE:PORT"),
    ],
)
def test_bad_flags(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError) as caught:
        source_of(text)
    assert said in str(caught.value)


async def test_a_name_is_resolved_to_all_its_addresses() -> None:
    answers: list[Any] = [["10.0.0.2", "10.0.0.1", "10.0.0.2", "fe80::1"], [], OSError(-2, "Name or service not known")]

    async def resolve(name: str) -> list[str]:
        assert name == "decode.svc"
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    options = SourceOptions(side_channel_port=7000, tp=2)
    source = DnsSource("decode=dns:decode.svc:8000", "decode", "decode.svc:8000", options, resolve)
    found = await source.look()
    assert found == {
        "decode": tuple(
            parse_spec(f"http://{host}:8000,side_channel={host}:7000,tp=2")
            for host in ("10.0.0.1", "10.0.0.2", "[fe80::1]")
        )
    }
    for said in ("it has no address", "Name or service not known"):
        with pytest.raises(PeerUnreachable) as caught:
            await source.look()
        assert said in str(caught.value)


async def test_a_real_name() -> None:
    source = source_of("decode=dns:localhost:8000")
    assert "http://127.0.0.1:8000" in [spec.url for spec in (await source.look())["decode"]]


# -- Kubernetes


def slice_of(*hosts: str, port: int = 8000, family: str = "IPv4", **conditions: bool) -> dict[str, Any]:
    return {
        "addressType": family,
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
        "endpoints": [{"addresses": [host], "conditions": conditions} for host in hosts],
    }


def test_which_endpoints_are_engines() -> None:
    slices = [
        slice_of("10.0.0.2", "10.0.0.1", ready=True),
        slice_of("10.0.0.3", ready=False),
        slice_of("10.0.0.4", ready=True, terminating=True),
        slice_of("10.0.0.5"),
        slice_of("fd00::1", family="IPv6", ready=True),
        slice_of("somewhere.example", family="FQDN"),
        {"addressType": "IPv4", "ports": None, "endpoints": None},
    ]
    found = [spec.url for spec in engines_of(slices, "http", SourceOptions())]
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.5", "[fd00::1]")
    assert found == sorted(f"http://{host}:8000" for host in hosts)
    assert [spec.url for spec in engines_of(slices[:1], "8100", SourceOptions(scheme="https"))] == [
        "https://10.0.0.1:8100",
        "https://10.0.0.2:8100",
    ]
    assert engines_of(slices, "grpc", SourceOptions()) == ()


class ApiServer:
    """EndpointSlices of one service over TLS, to whoever has the token; each change ends the watches."""

    def __init__(self) -> None:
        self.token = "t1"
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.asked: list[dict[str, str]] = []
        self.changed = asyncio.Condition()

    async def change(self, *items: dict[str, Any]) -> None:
        async with self.changed:
            self.items, self.version = list(items), self.version + 1
            self.changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({"path": request.path, **request.query})
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if "watch" not in request.query:
            body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}}
            return web.json_response(body | {"items": self.items})
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        async with self.changed:
            await self.changed.wait_for(lambda: self.version > seen)
        await response.write(json.dumps({"type": "MODIFIED", "object": {}}).encode() + b"\n")
        return response


def certify(key: Path, certificate: Path) -> None:
    """A new key, and a certificate for 127.0.0.1 that it signs itself."""
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=kubernetes"
    line += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(line.split(), check=True, capture_output=True)


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[ApiServer, str]]:
    key, certificate = folder / "key.pem", folder / "ca.crt"
    certify(key, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/{tail:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    (folder / "token").write_text("t1\n")
    try:
        yield server, f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_a_kubernetes_service_is_listed_and_watched(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (server, api):
        await server.change(slice_of("10.0.0.1", ready=True))
        source = KubernetesSource("w", "decode", "prod/engines:http", SourceOptions(), api, tmp_path)
        try:
            assert [spec.url for spec in (await source.look())["decode"]] == ["http://10.0.0.1:8000"]
            assert server.asked[-1] == {
                "path": "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices",
                "labelSelector": "kubernetes.io/service-name=engines",
            }
            waits = asyncio.create_task(source.wait())
            await until(lambda: "watch" in server.asked[-1])
            assert server.asked[-1]["resourceVersion"] == "2" and not waits.done()
            await server.change(slice_of("10.0.0.1", ready=True), slice_of("10.0.0.2", ready=True))
            await asyncio.wait_for(waits, 5)
            assert len((await source.look())["decode"]) == 2
            server.token = "t2"
            with pytest.raises(PeerUnreachable) as caught:
                await source.look()
            assert "401" in str(caught.value) and "endpointslices" in str(caught.value)
            (tmp_path / "token").write_text("t2")
            assert len((await source.look())["decode"]) == 2, "the token is read anew"
        finally:
            await source.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_an_api_server_with_another_certificate_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with cluster(tmp_path) as (server, api), cluster(tmp_path / "other"):
        source = KubernetesSource("w", "decode", "prod/engines:http", SourceOptions(), api, tmp_path / "other")
        try:
            with pytest.raises(KVFerryError) as caught:
                await source.look()
            assert "certificate" in str(caught.value).lower() and server.asked == []
        finally:
            await source.close()
