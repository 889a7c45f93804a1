"""`kvferry router`: arguments, start, clean end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from typing import get_args

import msgspec
from aiohttp import web

from kvferry.auth import KEY_HELP
from kvferry.errors import unknown_name
from kvferry.listener import bind, not_listening, runner, url_of
from kvferry.router.app import SERVICES, build_app
from kvferry.router.breaker import BreakerSettings
from kvferry.router.config import Connector, Mode, RouterConfig
from kvferry.router.discovery import DISCOVER
from kvferry.router.outliers import OutlierSettings
from kvferry.router.pool import Pool
from kvferry.router.spec import parse_spec

SPEC = "URL[,side_channel=HOST:PORT][,engine_id=ID][,tp=N]; the side channel defaults to the URL's host, port 5600"
BACKLOG = 4096
"""As many as may be in flight: clients that all come back at once after an outage must not be reset by the kernel."""
DRAIN_S = 1.0
"""A stop waits this long for running requests, then cancels them."""


def _one_of(what: str, names: tuple[str, ...]) -> Callable[[str], str]:
    """For argparse: the error names the nearest one, as that of `kvferry up` does."""

    def check(name: str) -> str:
        if name not in names:
            raise unknown_name(what, name, names)
        return name

    return check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
    parser.add_argument("--host", default=default["host"], help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=default["port"], help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--prefill", action="extend", nargs="+", default=[], metavar="SPEC", help=f"prefill engines: {SPEC}"
    )
    parser.add_argument(
        "--decode", action="extend", nargs="+", default=[], metavar="SPEC", help="the same, for decode engines"
    )
    parser.add_argument(
        "--connector",
        type=_one_of("connector", get_args(Connector)),
        metavar=f"{{{','.join(get_args(Connector))}}}",
        default=default["connector"],
        help="what the engines run: KVFerryConnector, vLLM's NixlConnector or NixlPushConnector, or none",
    )
    parser.add_argument(
        "--mode",
        type=_one_of("mode", get_args(Mode)),
        metavar=f"{{{','.join(get_args(Mode))}}}",
        default=default["mode"],
        help="of connector kvferry: prefill writes the KV when it is done (push) or while it computes (stream), decode "
        "reads it (pull), or one decode engine does all (colocated) (default: %(default)s)",
    )
    parser.add_argument(
        "--bind",
        default=default["bind"],
        metavar="WHEN",
        help="mode stream: choose the decode engine early, late (prefill is done) or at=PERCENT of it (default: early)",
    )
    parser.add_argument("--auth-key-file", default="", metavar="F", help=KEY_HELP)
    parser.add_argument("--story-dir", default="", metavar="DIR", help="append each request's events to a file there")
    parser.add_argument(
        "--request-timeout", type=float, default=0.0, metavar="S", help="for a whole request; 0: no limit (default)"
    )
    parser.add_argument("--api-key", default="", metavar="K", help="sent to engines where the client sent no key")
    parser.add_argument(
        "--max-body-mib", type=int, default=64, metavar="N", help="a larger request gets 413 (default: %(default)s)"
    )
    parser.add_argument("--allow-local-prefill", action="store_true", help="with no prefill engine, let D compute")
    parser.add_argument(
        "--retries",
        type=int,
        default=default["retries"],
        metavar="N",
        help="further tries, on other engines, of a request that failed before its first byte (default: %(default)s)",
    )
    parser.add_argument(
        "--discover",
        action="append",
        default=[],
        metavar="[ROLE=]SOURCE",
        help=f"engines that come and go: {DISCOVER}; can be repeated",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=default["drain_timeout_s"],
        metavar="S",
        help="an engine that is to go is waited for this long (default: %(default)s)",
    )
    add_breaker(parser)


def add_breaker(parser: argparse.ArgumentParser) -> None:
    default = BreakerSettings()
    parser.add_argument(
        "--breaker-failures",
        type=int,
        default=default.failures,
        metavar="N",
        help="so many failures in a row open an engine's circuit; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--breaker-open",
        type=float,
        default=default.open_s,
        metavar="S",
        help="an open circuit lets one request try after this long (default: %(default)s)",
    )
    parser.add_argument(
        "--no-outlier-ejection", action="store_true", help="keep engines that do far worse than others of their role"
    )


def config_of(args: argparse.Namespace) -> RouterConfig:
    """Raises `ConfigError`."""
    config = RouterConfig(
        host=args.host,
        port=args.port,
        prefill=tuple(parse_spec(text) for text in args.prefill),
        decode=tuple(parse_spec(text) for text in args.decode),
        connector=args.connector,
        mode=args.mode,
        bind=args.bind,
        auth_key_file=args.auth_key_file,
        story_dir=args.story_dir,
        request_timeout_s=args.request_timeout,
        api_key=args.api_key,
        max_body_bytes=args.max_body_mib * 1024 * 1024,
        allow_local_prefill=args.allow_local_prefill,
        retries=args.retries,
        discover=tuple(args.discover),
        drain_timeout_s=args.drain_timeout,
        breaker=BreakerSettings(failures=args.breaker_failures, open_s=args.breaker_open),
        outliers=OutlierSettings(enabled=not args.no_outlier_ejection),
    )
    config.check()
    return config


class Running:
    """A router that listens; `async with`. For `run` and for tests."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._app = build_app(config)
        self._runner = runner(self._app, DRAIN_S)
        self.url = ""

    @property
    def pool(self) -> Pool:
        return self._app[SERVICES].pool

    async def __aenter__(self) -> Running:
        """Raises `ConfigError` if the address cannot be bound."""
        host, port = self._config.host, self._config.port
        listener = bind(host, port)
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise not_listening(host, port, error) from None
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()
        self.url = url_of(listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def _serve(config: RouterConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Running(config) as running:
        print(f"listening {running.url}", flush=True)
        await stop.wait()


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError`: the caller prints it in one line and exits 1."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(config_of(args)))
    return 0
