"""TLS on both sides of the router, with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_process import router
from scripted import SOON, Engine, serving

from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.http.tls import engine_context, server_context
from kvferry.router.spec import parse_spec

x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with `cryptography`")


class Authority:
    """Signs certificates for 127.0.0.1; `pem(name)` is a file with key and certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._about = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.ca = str(folder / f"{name}-ca.pem")
        Path(self.ca).write_bytes(self._sign(self._key, self._about, authority=True))

    def _sign(self, key: Any, subject: Any, authority: bool) -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization

        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(True, False, False, False, False, authority, False, False, False)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._about)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(address, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def pem(self, name: str, password: bytes = b"") -> str:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        path = self._folder / f"{self._name}-{name}.pem"
        path.write_bytes(text + self._sign(key, subject, authority=False))
        return str(path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "strangers")


def client(authority: Authority, certificate: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if certificate:
        context.load_cert_chain(certificate)
    return context


async def test_clients_speak_tls(authority: Authority, stranger: Authority) -> None:
    async with serving(ssl_certfile=authority.pem("router")) as pair:
        assert pair.url.startswith("https://127.0.0.1:")
        async with pair.session.get(pair.url + "/health", ssl=client(authority)) as response:
            assert response.status == 200
        body = {"model": "toy", "prompt": "hi", "stream": True}
        async with pair.session.post(pair.url + "/v1/completions", json=body, ssl=client(authority)) as response:
            assert response.status == 200 and b"[DONE]" in await response.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await pair.session.get(pair.url + "/health", ssl=client(stranger))
        with pytest.raises(aiohttp.ClientError):
            await pair.session.get(pair.url.replace("https", "http") + "/health")


async def test_the_command_serves_it(authority: Authority) -> None:
    """On the event loop that it really runs on; both servers behind the one port."""
    arguments = ("--port", "0", "--decode", "127.0.0.1:9", "--mode", "colocated", "--ssl-certfile", authority.pem("r"))
    async with router(*arguments) as process, aiohttp.ClientSession() as session:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            url = (await process.stdout.readline()).decode().split()[1]
        assert url.startswith("https://")
        for _ in range(2):
            async with session.get(url + "/health", ssl=client(authority)) as response:
                assert response.status == 503 and (await response.json())["missing"] == ["decode"]
            async with session.post(url + "/v1/completions", json={"prompt": "x"}, ssl=client(authority)) as response:
                assert response.status == 503 and b"no_decode_engine" in await response.read()


async def test_clients_show_certificates(authority: Authority, stranger: Authority) -> None:
    settings = {"ssl_certfile": authority.pem("router"), "ssl_ca_certs": authority.ca}
    async with serving(**settings) as pair:
        async with pair.session.get(pair.url + "/health", ssl=client(authority, authority.pem("c"))) as response:
            assert response.status == 200
        for context in (client(authority), client(authority, stranger.pem("c"))):
            with pytest.raises(aiohttp.ClientError):
                async with pair.session.get(pair.url + "/health", ssl=context) as response:
                    await response.read()


async def test_the_admin_listener_speaks_tls_too(authority: Authority, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    settings = {"ssl_certfile": authority.pem("router"), "admin_port": 0, "admin_key_file": str(key)}
    async with serving(**settings) as pair:
        assert pair.running.admin_url.startswith("https://127.0.0.1:")
        url, headers = pair.running.admin_url + "/dashboard/data", {"Authorization": "Bearer 0123456789abcdef"}
        async with pair.session.get(url, headers=headers, ssl=client(authority)) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await pair.session.get(url.replace("https", "http"), headers=headers)


class TlsEngine(Engine):
    """The scripted one behind TLS: its plain port, and one that a connection is unwrapped on."""

    def __init__(self, role: str, certificate: str) -> None:
        super().__init__(role)
        self._certificate = certificate
        self._tls_port = 0

    async def start(self, keepalive_timeout: float = 75.0) -> None:
        await super().start(keepalive_timeout)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._certificate)
        site = web.TCPSite(self._runner, self.host, 0, ssl_context=context)
        await site.start()
        self._tls_port = self._runner.addresses[-1][1]

    def spec(self, **more: Any) -> Any:
        return parse_spec(f"https://127.0.0.1:{self._tls_port},side_channel=127.0.0.1:{self.side.port}")


@contextlib.asynccontextmanager
async def behind_tls(signer: Authority, **config: Any) -> AsyncIterator[Any]:
    engines = TlsEngine("prefill", signer.pem("p")), TlsEngine("decode", signer.pem("d"))
    async with serving(prefill=[engines[0]], decode=[engines[1]], ready=False, **config) as pair:
        yield pair


async def test_engines_speak_tls(authority: Authority) -> None:
    async with behind_tls(authority, engine_ca_certs=authority.ca) as pair:
        async with asyncio.timeout(SOON):
            await pair.running.pool.until_ready()
        for stream in (False, True):
            assert (await pair.complete(stream=stream))[0] == 200


@pytest.mark.parametrize("named", [True, False])
async def test_an_engine_that_a_stranger_signed_is_not_usable(
    named: bool, authority: Authority, stranger: Authority
) -> None:
    config = {"engine_ca_certs": authority.ca} if named else {}
    async with behind_tls(stranger, **config) as pair:
        engine = pair.running.pool.engines["decode"][0]
        async with asyncio.timeout(SOON):
            while "ertificate" not in engine.reason:
                await pair.running.pool.change()
        assert (await pair.complete())[0] == 503 and pair.d.calls == [] and pair.d.probes == []


def test_files_that_cannot_be_used(tmp_path: Path, authority: Authority) -> None:
    decode = (parse_spec("127.0.0.1:9"),)
    (tmp_path / "text").write_text("no certificate")
    locked = authority.pem("locked", password=b"secret")
    for config, said in (
        ({"ssl_certfile": str(tmp_path / "text")}, "--ssl-certfile"),
        ({"ssl_certfile": str(tmp_path / "none")}, "No such file"),
        ({"ssl_certfile": locked}, "password"),
        ({"ssl_certfile": authority.pem("x"), "ssl_ca_certs": str(tmp_path / "text")}, "--ssl-ca-certs"),
    ):
        with pytest.raises(ConfigError) as caught:
            server_context(RouterConfig(decode=decode, **config))
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="--engine-ca-certs"):
        engine_context(RouterConfig(decode=decode, engine_ca_certs=str(tmp_path / "none")))
