"""`kvferry router`: options of the render tier."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig


def add_rendering(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig(decode=())
    parser.add_argument(
        "--render",
        action="append",
        default=[],
        metavar="URL[,URL]",
        help="render workers (`kvferry render`): templates, tokens and parsers are theirs, engines get token ids only",
    )
    parser.add_argument(
        "--render-fallback",
        choices=("error", "engines"),
        default=default.render_fallback,
        help="where no render worker can be used: 503, or engines render themselves (default: %(default)s)",
    )
    parser.add_argument(
        "--render-timeout",
        type=float,
        default=default.render_timeout_s,
        metavar="S",
        help="a render worker that takes longer for one answer is lost (default: %(default)s)",
    )


def rendering_of(args: argparse.Namespace) -> dict[str, Any]:
    """Raises `ConfigError`."""
    urls = tuple(parse_url(text) for given in args.render for text in given.split(","))
    return {"render": urls, "render_fallback": args.render_fallback, "render_timeout_s": args.render_timeout}


def parse_url(text: str) -> str:
    """Without a slash at its end. Raises `ConfigError`."""
    text = text.strip()
    hint = "for example --render http://127.0.0.1:8300"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--render: {text!r}: {error}", hint=hint) from None
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query or parts.fragment:
        raise ConfigError(f"--render: {text!r}: expected the URL of a render worker", hint=hint)
    if parts.username is not None:
        raise ConfigError("--render: a worker's URL takes no user or password", hint="keys go into --api-key")
    return text.rstrip("/")
