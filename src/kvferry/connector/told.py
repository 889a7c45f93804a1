"""What a vLLM engine's API server tells a render tier about itself: `GET /v1/sessions/settings`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvferry.render.settings import Settings, of_frontend


class Told:
    """Made with the application, asked on its event loop. The answer is made once, in a thread: a vocabulary is large.

    An API key of the server is not asked for here: hashes and names of flags are all there is to read, and whoever
    compares them at start has no client's key.
    """

    def __init__(self) -> None:
        self._body: asyncio.Future[bytes] | None = None

    async def body(self, state: Any) -> bytes:
        """JSON of `Settings`. `state`: the application's, as vLLM's `init_app_state` left it."""
        if self._body is None:
            self._body = asyncio.ensure_future(asyncio.to_thread(encoded, state))
        return await asyncio.shield(self._body)


def encoded(state: Any) -> bytes:
    return msgspec.json.encode(settings_of(state))


def settings_of(state: Any) -> Settings:
    from vllm.tokenizers import cached_tokenizer_from_config

    config = state.vllm_config
    tokenizer = cached_tokenizer_from_config(config.model_config)
    return of_frontend(state.args, config, tokenizer, load_template=load_template)


def load_template(text: str) -> str | None:
    """A file's text, or the literal itself, by vLLM's rule."""
    try:
        from vllm.renderers.chat_utils import load_chat_template
    except ImportError:  # before the renderers were a package of their own
        from vllm.entrypoints.chat_utils import load_chat_template
    loaded: str | None = load_chat_template(text)
    return loaded
