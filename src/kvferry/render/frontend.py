"""vLLM's frontend, built over an engine that is elsewhere. Importing this loads vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.render import compat, identity, metered
from kvferry.render.asgi import App
from kvferry.render.engine import RemoteEngine


class Frontend(NamedTuple):
    """vLLM's app, started; the body of the settings route; how many choices wait for tokens; clients' keys."""

    app: App
    settings: bytes
    requests: Callable[[], int]
    keys: list[str]


@asynccontextmanager
async def frontend(model: str, rest: list[str]) -> AsyncIterator[Frontend]:
    """`rest`: vLLM's own arguments. Raises `ConfigError`."""
    args = compat.parse_arguments(model, rest)
    compat.import_plugins(args)
    try:
        config = compat.frontend_config(args)
    except (OSError, ValueError) as error:
        raise ConfigError(f"render: model {model} can't be read: {_line(error)}") from None
    names = args.served_model_name or [args.model]
    engine = compat.concrete(RemoteEngine)(config, names[0])
    if engine.renderer.tokenizer is None:
        raise ConfigError(f"render: model {model} has no tokenizer", hint="its folder must have one")
    identity.install()
    compat.make_parsers_linear()
    metered.install(asyncio.get_running_loop())
    try:
        app = await compat.build(engine, args)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"render: vLLM's frontend did not start: {_line(error)}") from None
    settings = compat.settings(args, config, engine.renderer.tokenizer)
    try:
        async with compat.started(app):
            yield Frontend(app, settings, engine.output_processor.get_num_unfinished_requests, compat.api_keys(args))
    finally:
        engine.shutdown()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
