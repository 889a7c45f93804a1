"""`kv_transfer_params` of one request, checked: whatever a client or router may send, no hook of ours raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import ConfigError
from kvferry.protocol.messages import Mode, Transfer


class SourceParams(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill: `do_remote_decode`. `fan_out`: how many decode requests will take this KV (`n` of the client)."""

    do_remote_decode: Literal[True]
    transfer_id: Transfer
    mode: Mode | None = None
    fan_out: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1


class LandingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Decode: `do_remote_prefill`, and where the prefill engine's side channel is."""

    do_remote_prefill: Literal[True]
    transfer_id: Transfer
    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_engine_id: str = ""
    remote_tp_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    mode: Mode | None = None


_REQUIRED = ("transfer_id", "remote_host", "remote_port")


def parse(raw: Any) -> SourceParams | LandingParams | None:
    """None: no transfer asked for. Raises `ConfigError` naming the first field that is missing or wrong."""
    if not isinstance(raw, Mapping):
        return None
    kind: type[SourceParams] | type[LandingParams]
    if raw.get("do_remote_prefill"):
        kind = LandingParams
        for name in _REQUIRED:
            if raw.get(name) in (None, ""):
                raise ConfigError(f"kv_transfer_params.{name} is missing", hint="do_remote_prefill needs it")
    elif raw.get("do_remote_decode"):
        kind = SourceParams
        if not raw.get("transfer_id"):
            raise ConfigError("kv_transfer_params.transfer_id is missing", hint="do_remote_decode needs it")
    else:
        return None
    try:
        return msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_transfer_params: {error}") from None
