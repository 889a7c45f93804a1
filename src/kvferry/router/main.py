"""`kvferry router`: arguments, start, clean end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import get_args

import msgspec
import uvloop

from kvferry.auth import KEY_HELP
from kvferry.errors import ConfigError, unknown_name
from kvferry.listener import bind, not_listening, runner, url_of
from kvferry.router.admin.admin import LEAST_KEY, Admin
from kvferry.router.admin.guard import Guard
from kvferry.router.admin.guard_arguments import add_guarding, guarding_of
from kvferry.router.admin.keys import Keys
from kvferry.router.app import GENERATE, ROUTER, build_app
from kvferry.router.choice.selection_arguments import add_selection, selection_of
from kvferry.router.config import Connector, FirstToken, Mode, RouterConfig, mode_of
from kvferry.router.dispatch.selection import Selection
from kvferry.router.engines.breaker import BreakerSettings
from kvferry.router.engines.discovery import DISCOVER, source_of
from kvferry.router.engines.outliers import OutlierSettings
from kvferry.router.engines.pool import Pool
from kvferry.router.http.server import Server
from kvferry.router.http.tls import engine_context, server_context
from kvferry.router.render.arguments import add_rendering, rendering_of
from kvferry.router.seen import logs
from kvferry.router.seen.tracing import tracing_to
from kvferry.router.spec import parse_spec

SPEC = (
    "URL[,side_channel=HOST:PORT][,engine_id=ID][,tp=N][,dp=N][,topology=LABEL][,kv_events=HOST:PORT]; "
    "the side channel defaults to the URL's host, port 5600"
)
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
        help="of connector kvferry: prefill writes the KV when it is done (push) or while it computes (stream), decode "
        "reads it (pull), or one decode engine does all (colocated) (default: push; other connectors have one each)",
    )
    parser.add_argument(
        "--bind",
        default=default["bind"],
        metavar="WHEN",
        help="mode stream: choose the decode engine early, late (prefill is done) or at=PERCENT of it (default: early)",
    )
    parser.add_argument(
        "--first-token",
        type=_one_of("--first-token", get_args(FirstToken)),
        metavar=f"{{{','.join(get_args(FirstToken))}}}",
        default=default["first_token"],
        help="mode pull, or stream bound late: send prefill's own first token at once where that changes no answer "
        "(default: %(default)s)",
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
    add_selection(parser)
    add_rendering(parser)
    add_staying(parser)
    add_guarding(parser)


def add_staying(parser: argparse.ArgumentParser) -> None:
    """How the router outlives its engines."""
    default = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
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
        mode=mode_of(args.connector, args.mode),
        bind=args.bind,
        first_token=args.first_token,
        auth_key_file=args.auth_key_file,
        story_dir=args.story_dir,
        request_timeout_s=args.request_timeout,
        api_key=args.api_key,
        max_body_bytes=args.max_body_mib * 1024 * 1024,
        allow_local_prefill=args.allow_local_prefill,
        **guarding_of(args),
        retries=args.retries,
        discover=tuple(args.discover),
        drain_timeout_s=args.drain_timeout,
        breaker=BreakerSettings(failures=args.breaker_failures, open_s=args.breaker_open),
        outliers=OutlierSettings(enabled=not args.no_outlier_ejection),
        **selection_of(args),
        **rendering_of(args),
    )
    config.check()
    return config


def check_files(config: RouterConfig) -> None:
    """Of what can be told before a start: the files that it names, and where spans and engines come from. Raises
    `ConfigError`."""
    server_context(config)
    engine_context(config)
    Guard(config)
    if config.admin_key_file:
        Keys(config.admin_key_file, "--admin-key-file", least=LEAST_KEY)
    tracing_to(config.otlp_traces_endpoint)
    for text in config.discover:
        source_of(text)


def calm_collector() -> None:
    """What lives for good is never looked at again, and what requests leave behind is looked at less often: with the
    interpreter's own thresholds a collection stops all streams for tens of milliseconds now and then. Much higher ones
    let memory grow by what streams that were cut leave in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def quick_logging() -> None:
    """Nobody asks a record where it was made; finding out costs more than the line (the manual's own advice)."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class Running:
    """A router that listens; `async with`. For `run` and for tests."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._tls = server_context(config)
        self._app = build_app(config)
        self._runner = runner(self._app, DRAIN_S)
        self._admin = Admin(config, self._app[ROUTER]) if config.admin_port is not None else None
        self._server: Server
        self._listening: asyncio.Server
        self.url = ""

    @property
    def pool(self) -> Pool:
        return self._app[ROUTER].services.pool

    async def until_rendering(self) -> None:
        """Returns when a render worker is ready; at once if there is no tier."""
        render = self._app[ROUTER].services.render
        if render is not None:
            await render.until_ready()

    @property
    def selection(self) -> Selection:
        return self._app[ROUTER].services.selection

    async def __aenter__(self) -> Running:
        """Raises `ConfigError` if the address cannot be bound."""
        host, port = self._config.host, self._config.port
        listener = bind(host, port)
        try:
            if self._admin is not None:
                self._admin.bind()
            listener.listen(BACKLOG)
        except ConfigError:
            listener.close()
            raise
        except OSError as error:
            listener.close()
            if self._admin is not None:
                self._admin.close()
            raise not_listening(host, port, error) from None
        await self._runner.setup()
        general = self._runner.server
        assert general is not None
        router = self._app[ROUTER]
        most = self._config.max_body_bytes
        self._server = Server(frozenset(GENERATE), router.generate, general, most, router.admit)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._server, sock=listener, ssl=self._tls, backlog=BACKLOG)
        self.url = url_of(listener, self._tls)
        if self._admin is not None:
            await self._admin.start()
        return self

    @property
    def admin_url(self) -> str:
        """ "" where there is no admin listener."""
        return self._admin.url if self._admin is not None else ""

    async def __aexit__(self, *_: object) -> None:
        if self._admin is not None:
            await self._admin.stop()
        self._listening.close()
        await self._server.close(DRAIN_S)
        await self._runner.cleanup()


async def _serve(config: RouterConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Running(config) as running:
        print(f"listening {running.url}", flush=True)
        if running.admin_url:
            print(f"admin {running.admin_url}", flush=True)
        await stop.wait()


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError`: the caller prints it in one line and exits 1."""
    quick_logging()
    logs.set_up(args.log_format, args.log_level)
    calm_collector()
    uvloop.run(_serve(config_of(args)))
    return 0
