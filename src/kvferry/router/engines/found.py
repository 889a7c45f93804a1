"""What a source of engines says, and the options that all addresses of one source share. Pure."""

from __future__ import annotations

import msgspec

from kvferry.errors import ConfigError, unknown_name
from kvferry.router.engines.pool import Role
from kvferry.router.spec import DEFAULT_SIDE_CHANNEL_PORT, EngineSpec, parse_spec

Found = dict[Role, tuple[EngineSpec, ...]]


class SourceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    side_channel_port: int = DEFAULT_SIDE_CHANNEL_PORT
    tp: int = 0
    scheme: str = "http"
    interval_s: float = 5.0
    """Between two looks, where the source doesn't say itself that something changed."""

    def spec(self, host: str, port: int) -> EngineSpec:
        """Of an engine at this address. Raises `ConfigError`."""
        name = f"[{host}]" if ":" in host else host
        text = f"{self.scheme}://{name}:{port},side_channel={name}:{self.side_channel_port}"
        return parse_spec(text + (f",tp={self.tp}" if self.tp else ""))


def options_of(what: str, parts: list[str]) -> SourceOptions:
    """`NAME=VALUE` each. Raises `ConfigError`."""
    values: dict[str, str] = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        if name not in SourceOptions.__struct_fields__:
            raise unknown_name(what, name, SourceOptions.__struct_fields__)
        values[name] = value
    try:
        options = msgspec.convert(values, SourceOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}") from None
    if options.scheme not in ("http", "https"):
        raise ConfigError(f"{what}: scheme {options.scheme!r}", hint="http or https")
    if not 0 < options.side_channel_port < 65536 or options.tp < 0 or not options.interval_s > 0:
        hint = "side_channel_port is 1 to 65535, tp 0 or more, interval_s above 0"
        raise ConfigError(f"{what}: a number that can't be", hint=hint)
    return options
