"""One engine as the command line names it: `URL[,side_channel=HOST:PORT][,engine_id=ID][,tp=N]...`. Pure.

IPv6 hosts are bracketed in both places. The side channel defaults to the URL's host and port 5600.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import ConfigError, unknown_name

DEFAULT_SIDE_CHANNEL_PORT = 5600  # upstream's and ours: VLLM_NIXL_SIDE_CHANNEL_PORT's default
OPTIONS = ("side_channel", "engine_id", "tp", "dp", "topology", "kv_events")
EXAMPLE = "http://127.0.0.1:8100,side_channel=127.0.0.1:5600"


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where one engine is. `url` has no trailing slash; `engine_id` "" and `tp` 0 mean 'not told'.

    `dp`: data-parallel ranks behind this URL, 0: not told. `topology`: a label, such as a rack's name, "" for none.
    `events_host` and `events_port`: where its first rank publishes KV events, rank r on the port + r; "" if it doesn't.
    """

    url: str
    side_host: str
    side_port: int
    engine_id: str = ""
    tp: int = 0
    dp: int = 0
    topology: str = ""
    events_host: str = ""
    events_port: int = 0


def parse_spec(text: str) -> EngineSpec:
    """Raises `ConfigError` that names the part and the right spelling."""
    url, *rest = [part.strip() for part in text.split(",")]
    url, host = _parse_url(url)
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if key not in OPTIONS:
            raise unknown_name(f"engine {url}", key, OPTIONS)
        if not equals or not value:
            raise ConfigError(f"engine {url}: {key} needs a value", hint=f"for example {EXAMPLE}")
        if key in options:
            raise ConfigError(f"engine {url}: {key} is given twice")
        options[key] = value
    side_host, side_port = host, DEFAULT_SIDE_CHANNEL_PORT
    if "side_channel" in options:
        side_host, side_port = parse_host_port(options["side_channel"], f"engine {url}: side_channel")
    events_host, events_port = "", 0
    if "kv_events" in options:
        events_host, events_port = parse_host_port(options["kv_events"], f"engine {url}: kv_events")
    return EngineSpec(
        url=url,
        side_host=side_host,
        side_port=side_port,
        engine_id=options.get("engine_id", ""),
        tp=_positive(options["tp"], f"engine {url}: tp") if "tp" in options else 0,
        dp=_positive(options["dp"], f"engine {url}: dp") if "dp" in options else 0,
        topology=options.get("topology", ""),
        events_host=events_host,
        events_port=events_port,
    )


def parse_host_port(text: str, what: str) -> tuple[str, int]:
    """`HOST:PORT` or `[V6]:PORT`; the host comes back without brackets."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_v6(host):
            raise ConfigError(f"{what}: {host!r} is no IPv6 address")
    elif ":" in host:
        raise ConfigError(f"{what}: IPv6 address without brackets: {text!r}", hint=f"write {_bracketed(text)}")
    if not colon or not host:
        raise ConfigError(f"{what}: expected HOST:PORT, got {text!r}")
    return host, _port(port, what)


def _parse_url(text: str) -> tuple[str, str]:
    if "@" in text:
        raise ConfigError("an engine's URL takes no user or password", hint="keys go into --api-key")
    if "://" not in text:
        if text.count(":") > 1 and not text.startswith("["):
            raise ConfigError(
                f"engine {text!r}: IPv6 address without brackets", hint=f"write http://{_bracketed(text)}"
            )
        text = f"http://{text}"
    scheme, _, rest = text.partition("://")
    authority = rest.split("/", 1)[0]
    if scheme not in ("http", "https"):
        raise ConfigError(f"engine {text!r}: scheme {scheme!r}", hint="http:// or https://")
    if authority.count(":") > 1 and not authority.startswith("["):
        raise ConfigError(
            f"engine {text!r}: IPv6 address without brackets", hint=f"write {scheme}://{_bracketed(authority)}"
        )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"engine {text!r}: {error}", hint=f"for example {EXAMPLE}") from None
    if not host or parts.query or parts.fragment:
        raise ConfigError(f"engine {text!r}: expected URL of host and port", hint=f"for example {EXAMPLE}")
    if port == 0:
        raise ConfigError(f"engine {text!r}: port 0")
    return text.rstrip("/"), host


def _bracketed(text: str) -> str:
    """The right spelling of a bare IPv6 address with or without a port."""
    host, _, port = text.rpartition(":")
    if _is_v6(host) and port.isdigit():
        return f"[{host}]:{port}"
    return f"[{text}]:PORT"


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.split("%", 1)[0]).version == 6
    except ValueError:
        return False


def _port(text: str, what: str) -> int:
    port = _positive(text, f"{what}: port")
    if port > 65535:
        raise ConfigError(f"{what}: port {port} is above 65535")
    return port


def _positive(text: str, what: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{what}: expected a number from 1 up, got {text!r}")
    return int(text)
