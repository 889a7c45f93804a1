"""Engines behind a Kubernetes service: its EndpointSlices, listed and then watched with the pod's service account.

The account needs `get`, `list` and `watch` on `endpointslices` of `discovery.k8s.io` in that namespace.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.errors import ConfigError, PeerUnreachable
from kvferry.router.engines.found import Found, SourceOptions
from kvferry.router.engines.pool import Role
from kvferry.router.spec import EngineSpec

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
WATCH_S = 300
"""The API server ends a watch after this long; then all is listed anew."""
MOST_BYTES = 16 << 20


def in_cluster_api() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        hint = "run the router in a pod, or set KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT"
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set, so the Kubernetes API can't be found", hint=hint)
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class KubernetesSource:
    """`account`: folder with `token` and `ca.crt`; the token is read for each request, since it is changed in place.
    Raises `ConfigError` for a `target` that is not NAMESPACE/SERVICE:PORT, and outside of a cluster."""

    def __init__(
        self, where: str, role: Role, target: str, options: SourceOptions, api: str = "", account: Path = ACCOUNT
    ) -> None:
        self.where = where
        self._role = role
        self._options = options
        namespace, slash, rest = target.partition("/")
        service, colon, self._port = rest.partition(":")
        if not (slash and colon and namespace and service and self._port):
            raise ConfigError(f"--discover {where!r}: expected NAMESPACE/SERVICE:PORT", hint="PORT: number or name")
        self._api = api or in_cluster_api()
        self._account = account
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._version = ""
        self._session: aiohttp.ClientSession | None = None

    async def look(self) -> Found:
        listed = await self._get(self._query)
        try:
            self._version = str(listed["metadata"]["resourceVersion"])
            return {self._role: engines_of(listed["items"], self._port, self._options)}
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise PeerUnreachable(f"{self._api}{self._path} answered no list of EndpointSlices: {error!r}") from None

    async def wait(self) -> None:
        """Until a slice changes, or the watch ends; an old version (410) ends it at once."""
        more = {"watch": "1", "resourceVersion": self._version, "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=WATCH_S + TIMEOUT_S, sock_connect=TIMEOUT_S)
        try:
            async with self._open().get(
                self._api + self._path, params=self._query | more, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status == 410:
                    return
                await self._expect(response)
                await response.content.readline()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
            raise PeerUnreachable(f"{self._api}{self._path}: watch: {error or type(error).__name__}") from None
        await asyncio.sleep(0.1)  # a rollout changes many slices at once

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, query: dict[str, str]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._open().get(
                self._api + self._path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                await self._expect(response)
                body = await response.content.read(MOST_BYTES)
                while chunk := await response.content.read(MOST_BYTES - len(body)):
                    body += chunk
                facts = json.loads(body)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise PeerUnreachable(f"{self._api}{self._path}: {error or type(error).__name__}") from None
        except ValueError as error:
            raise PeerUnreachable(f"{self._api}{self._path}: no JSON: {error}") from None
        if not isinstance(facts, dict):
            raise PeerUnreachable(f"{self._api}{self._path} answered {type(facts).__name__}, not an object")
        return facts

    async def _expect(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        hint = ""
        if response.status in (401, 403):
            hint = "the service account needs get, list and watch on endpointslices of discovery.k8s.io"
        raise PeerUnreachable(f"{self._api}{self._path} answered {response.status}", hint=hint)

    def _headers(self) -> dict[str, str]:
        token = self._account / "token"
        try:
            return {"Authorization": f"Bearer {token.read_text().strip()}", "Accept": "application/json"}
        except OSError as error:
            raise PeerUnreachable(f"{token}: {error.strerror or error}") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            authority = self._account / "ca.crt"
            try:
                trust = ssl.create_default_context(cafile=str(authority))
            except (OSError, ssl.SSLError) as error:
                raise PeerUnreachable(f"{authority}: {error.strerror or error}") from None
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))
        return self._session


def engines_of(slices: list[dict[str, Any]], port: str, options: SourceOptions) -> tuple[EngineSpec, ...]:
    """Ready endpoints. `port`: a number, taken as it is, or the name of one of the slice's ports. Raises `LookupError`,
    `TypeError` or `AttributeError` for what is no EndpointSlice."""
    specs: dict[str, EngineSpec] = {}
    for one in slices:
        number = int(port) if port.isdecimal() else _port_named(one, port)
        if number is None or one.get("addressType") == "FQDN":
            continue
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("ready", True) is not False and not conditions.get("terminating"):
                spec = options.spec(endpoint["addresses"][0], number)
                specs[spec.url] = spec
    return tuple(specs[url] for url in sorted(specs))


def _port_named(one: dict[str, Any], name: str) -> int | None:
    for port in one.get("ports") or ():
        if port.get("name") == name and isinstance(port.get("port"), int):
            return int(port["port"])
    return None
