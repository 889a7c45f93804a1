"""One engine as the doctor's command line names it. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.errors import ConfigError
from kvferry.router.spec import parse_host_port, parse_spec
from kvferry.transfer.inquiry import endpoint

Role = Literal["prefill", "decode"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine is said to be. `url` '': only its side channel was named. `engine_id` '', `tp` 0: not said."""

    role: Role
    url: str
    host: str
    port: int
    engine_id: str
    tp: int

    @property
    def name(self) -> str:
        """For people, before the engine has said its own name."""
        return f"{self.role} {self.url or address(self.host, self.port)}"


def address(host: str, port: int) -> str:
    """`host:port`, IPv6 in brackets."""
    return endpoint(host, port).removeprefix("tcp://")


def parse_target(text: str, role: Role) -> Target:
    """`http://HOST:PORT[,side_channel=HOST:PORT][,engine_id=ID][,tp=N]` as for the router, or the side channel's
    `HOST:PORT[,engine_id=ID][,tp=N]` alone. Raises `ConfigError`."""
    if "://" in text:
        spec = parse_spec(text)
        return Target(
            role=role,
            url=spec.url,
            host=spec.side_host,
            port=spec.side_port,
            engine_id=spec.engine_id,
            tp=spec.tp,
        )
    where, _, options = text.partition(",")
    host, port = parse_host_port(where.strip(), f"--{role}")
    if "side_channel=" in options:
        raise ConfigError(
            f"--{role} {text!r}: two side channels", hint=f"write http://HOST:PORT,{options} or {where} alone"
        )
    spec = parse_spec(f"http://{where.strip()}{',' if options else ''}{options}")
    return Target(role=role, url="", host=host, port=port, engine_id=spec.engine_id, tp=spec.tp)
