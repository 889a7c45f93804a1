"""`kvferry router`: options of who may ask, over what, and where it is seen."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.router.config import RouterConfig


def add_guarding(parser: argparse.ArgumentParser) -> None:
    default = {
        name: getattr(RouterConfig(decode=()), name)
        for name in ("admin_host", "max_requests", "log_format", "log_level")
    }
    add = parser.add_argument
    add("--ssl-certfile", default="", metavar="F", help="serve HTTPS with this certificate (PEM)")
    add("--ssl-keyfile", default="", metavar="F", help="its key, if that isn't in the same file")
    add("--ssl-ca-certs", default="", metavar="F", help="clients must show a certificate that one of these signed")
    add(
        "--engine-ca-certs",
        default="",
        metavar="F",
        help="who signs https engines' certificates (default: the system's)",
    )
    add("--client-key-file", default="", metavar="F", help="clients must send one of its keys, a line each, as bearer")
    add(
        "--max-requests",
        type=int,
        default=default["max_requests"],
        metavar="N",
        help="in flight at once, one more gets 429 (default: %(default)s)",
    )
    add(
        "--admin-port",
        type=int,
        default=None,
        metavar="PORT",
        help="dashboard and operations there; 0 takes a free one",
    )
    add(
        "--admin-host", default=default["admin_host"], metavar="HOST", help="for it to listen on (default: %(default)s)"
    )
    add("--admin-key-file", default="", metavar="F", help="who asks there must send its key; a must beyond loopback")
    add(
        "--log-format", choices=("text", "json"), default=default["log_format"], help="of stderr (default: %(default)s)"
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error", "critical"),
        default=default["log_level"],
        help="warning: requests that went well have no line (default: %(default)s)",
    )
    add(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send OpenTelemetry spans there (pip install 'kvferry[otel]')",
    )


def guarding_of(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "engine_ca_certs", "client_key_file", "max_requests"),
        *("admin_port", "admin_host", "admin_key_file", "log_format", "log_level", "otlp_traces_endpoint"),
    )
    return {name: getattr(args, name) for name in names}
