"""The engine's HTTP side: vLLM's routes, status codes and error bodies, as a router in front of it expects them.

Owner: the event loop. The engine thread calls `deliver` once per step; that is one wake-up of the event loop, whose
callback hands each output to its choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
from aiohttp import HttpVersion11, web

from kvferry.engine import openai
from kvferry.engine.exposition import Metrics
from kvferry.engine.generate import Generate, GenerateReplies, completion_of, generate_ask
from kvferry.engine.generation import Choice, Generation
from kvferry.engine.loop import Stats
from kvferry.engine.openai import Abort, BadRequest, ChatCompletion, Completion, Detokenize, Tokenize
from kvferry.engine.replies import JSON, Prompt, Replies, encode, error_body
from kvferry.engine.request import Output, Request
from kvferry.engine.responses import Responses, ResponsesReplies, chat_of_responses
from kvferry.engine.settings import settings_of
from kvferry.engine.text import Chat, Tokenizer
from kvferry.errors import ConfigError, EngineError, KVFerryError
from kvferry.observe.metrics import CONTENT_TYPE
from kvferry.render.settings import PATH as SETTINGS
from kvferry.transfer.stats import TransferStats

log = logging.getLogger("kvferry.engine")

GUARDED = ("/v1", "/inference", "/fault")
"""An API key is asked for under these. `/health`, `/metrics` and the like are open, as vLLM's are."""
MAX_BODY_BYTES = 256 * 1024 * 1024
LONG_TEXT = 4096
"""Characters from which a text is encoded in a thread, by tokenizers that let others run meanwhile."""
WATCH_S = 0.2
"""How often it is looked whether the engine thread still lives."""
PRIORITY_HEADER = "X-Vllm-Priority"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine(Protocol):
    """What the server needs of the engine loop, from any thread. All but `stats` raise `EngineError` once it is dead;
    `inject` waits for the end of a step.
    """

    @property
    def death(self) -> BaseException | None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> Stats: ...
    def inject(self, fault: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """`names`: what the model is called, the first one in replies. `api_keys`: any of them will do; none: open.
    `transfers`: whether the engine has a connector, and /metrics tells of it."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    api_keys: tuple[str, ...] = ()
    faults: bool = False
    transfers: bool = False
    cache: Mapping[str, object] = field(default_factory=dict)
    """How the KV pool is built, by vLLM's names."""


class Server:
    """Made on the event loop, before the engine; `engine` must be set before the first request comes."""

    engine: Engine

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.metrics = Metrics(config.names[0], lambda: self.engine.stats(), config.transfers, config.cache)
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._choices: dict[str, Choice] = {}
        self._generations: dict[str, Generation] = {}
        self._created = int(time.time())

    @property
    def busy(self) -> list[Generation]:
        """Client requests that have not been answered to the end."""
        return list(self._generations.values())

    # -- the engine's outputs

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Engine thread."""
        self._loop.call_soon_threadsafe(self._hand_out, outputs, time.monotonic())

    def moved(self, transfers: TransferStats) -> None:
        """Engine thread."""
        if self.metrics.transfers is not None:
            self._loop.call_soon_threadsafe(self.metrics.transfers.observe, transfers)

    def _hand_out(self, outputs: Sequence[Output], at: float) -> None:
        choices = self._choices
        for output in outputs:
            choice = choices.get(output.request_id)
            if choice is None:
                continue
            if output.finish_reason is not None:
                del choices[output.request_id]
            if choice.take_in(output, at):
                choices.pop(output.request_id, None)
                if output.finish_reason is None:
                    self._abort(output.request_id)

    def _abort(self, engine_id: str) -> None:
        with contextlib.suppress(EngineError):  # a dead engine has nothing to abort
            self.engine.abort(engine_id)

    async def watch(self) -> None:
        """Until the engine thread is dead: then every request fails."""
        while self.engine.death is None:  # noqa: ASYNC110 - a thread's end is no event of this loop
            await asyncio.sleep(WATCH_S)
        for generation in self.busy:
            generation.fail(f"the engine died: {self.engine.death}")

    # -- completions and chats

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = openai.read_completion(await _json_body(request))
        self._check_model(body.model)
        prompts = []
        for item in openai.prompts_of(body):
            ids = item if isinstance(item, list) else await self._encode(item, body.add_special_tokens)
            fitted = self._fit(body, ids, of_text=isinstance(item, str))
            prompts.append(Prompt(token_ids=fitted, text=item if isinstance(item, str) else None))
        if not prompts:
            raise BadRequest("You must pass at least one prompt", param="prompt")
        reply_id = f"cmpl-{_request_id(request, body.request_id)}"
        replies = self._replies(body, reply_id)
        return await self._answer(request, body, prompts, replies, [f"{reply_id}-{at}" for at in range(len(prompts))])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = openai.read_chat(await _json_body(request))
        self._check_model(body.model)
        text = self._render(openai.chat_of(body))
        ids = self._fit(body, await self._encode(text, body.add_special_tokens), of_text=True)
        reply_id = f"chatcmpl-{_request_id(request, body.request_id)}"
        role, echoed = openai.role_and_echo(body)
        replies = self._replies(body, reply_id, role, echoed)
        replies.block = self._block
        return await self._answer(request, body, [Prompt(token_ids=ids, text=text)], replies, [reply_id])

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = openai.read(Generate, await _json_body(request))
        self._check_model(body.model)
        completion = completion_of(body, self.config.max_model_len)
        ids = self._fit(completion, body.token_ids, of_text=False)
        reply_id = f"generate-tokens-{_request_id(request, body.request_id)}"
        replies = GenerateReplies(
            generate_ask(completion),
            self._tokenizer,
            reply_id=reply_id,
            model=self.config.names[0],
            created=int(time.time()),
        )
        replies.prompt_ids, replies.text = bool(body.return_token_ids), body.output_mode == "text"
        return await self._answer(request, completion, [Prompt(token_ids=ids)], replies, [reply_id])

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = openai.read(Responses, await _json_body(request))
        self._check_model(body.model)
        chat = chat_of_responses(body)
        openai.check_chat(chat)
        text = self._render(openai.chat_of(chat))
        ids = self._fit(chat, await self._encode(text, False), of_text=True)
        ask = replace(openai.ask_of(chat), route=openai.RESPONSES)
        reply_id = body.request_id or f"resp_{uuid.uuid4().hex}"
        model, created = self.config.names[0], int(time.time())
        replies = ResponsesReplies(ask, self._tokenizer, reply_id=reply_id, model=model, created=created)
        room = self.config.max_model_len - len(ids)
        replies.body, replies.limit = body, min(room, body.max_output_tokens or room)
        replies.block = self._block
        return await self._answer(request, chat, [Prompt(token_ids=ids, text=text)], replies, [f"{reply_id}_0"])

    @property
    def _block(self) -> int:
        """Tokens of a block of the prefix cache; 0: prompts aren't cached."""
        cache = self.config.cache
        return int(str(cache["block_size"])) if cache.get("enable_prefix_caching") else 0

    async def ping(self, request: web.Request) -> web.StreamResponse:
        return await self.health(request)

    async def no_response(self, request: web.Request) -> web.StreamResponse:
        """Nothing is stored."""
        name = request.match_info["id"]
        raise BadRequest(
            f"Response with id '{name}' not found.", param="response_id", status=404, kind="invalid_request_error"
        )

    def _replies(self, body: Completion | ChatCompletion, reply_id: str, role: str = "", echoed: str = "") -> Replies:
        return Replies(
            openai.ask_of(body),
            self._tokenizer,
            reply_id=reply_id,
            model=self.config.names[0],
            created=int(time.time()),
            role=role,
            echoed=echoed,
        )

    async def _answer(
        self,
        request: web.Request,
        body: Completion | ChatCompletion,
        prompts: Sequence[Prompt],
        replies: Replies,
        ids: Sequence[str],
    ) -> web.StreamResponse:
        """`ids`: of the requests, one per prompt; the engine's own end in something random, so that they are new."""
        generation = Generation(replies.ask, replies, self.metrics, time.monotonic())
        requests: list[Request] = []
        priority = _priority(request, body.priority)
        for prompt, name in zip(prompts, ids, strict=True):
            sampling = openai.sampling_of(body, replies.ask, len(prompt.token_ids), self.config.max_model_len, priority)
            unique = f"{name}-{uuid.uuid4().hex[:8]}"
            for at in range(replies.ask.n):
                engine_id = f"{at}_{unique}" if replies.ask.n > 1 else unique
                requests.append(Request(engine_id, prompt.token_ids, sampling, body.kv_transfer_params))
                index = len(generation.choices)
                generation.choices.append(
                    Choice(generation, index, engine_id, prompt, self._tokenizer, sampling.min_tokens)
                )
        key = requests[0].request_id
        self._generations[key] = generation
        try:
            for choice, engine_request in zip(generation.choices, requests, strict=True):
                self._choices[choice.engine_id] = choice
                self.engine.add(engine_request)
            if replies.ask.stream:
                return await self._stream(request, generation)
            await generation.done
            if generation.error:
                return _failed(generation.error)
            return web.Response(body=generation.whole(), content_type="application/json")
        finally:
            del self._generations[key]
            for choice in generation.choices:
                if self._choices.pop(choice.engine_id, None) is not None:
                    self._abort(choice.engine_id)

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        if early := generation.replies.early():
            await response.prepare(request)
            await response.write(early)
        await generation.first
        if not early:
            if generation.error:
                return _failed(generation.error)
            await response.prepare(request)
        if not generation.done.done():
            await response.write(generation.take())
            generation.attach(request)
            await generation.done
            generation.detach()
        await response.write_eof(generation.take())
        return response

    # -- prompts

    def _render(self, chat: Chat) -> str:
        try:
            return self._tokenizer.render(chat)
        except ConfigError as error:
            raise BadRequest(str(error), param="messages") from None

    async def _encode(self, text: str, special: bool) -> list[int]:
        if self._tokenizer.threaded and len(text) >= LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode, text, special=special)
        return self._tokenizer.encode(text, special=special)

    def _fit(self, body: Completion | ChatCompletion, ids: list[int], *, of_text: bool) -> list[int]:
        limits = self.config
        return openai.fit_prompt(
            body, ids, of_text=of_text, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size
        )

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.config.names:
            raise BadRequest(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self.config.names)}.",
                param="model",
                status=404,
                kind="NotFoundError",
            )

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = openai.read(Tokenize, await _json_body(request))
        self._check_model(body.model)
        if body.messages is not None:
            ids = await self._encode(self._render(openai.chat_of(body)), bool(body.add_special_tokens))
        elif body.prompt is not None:
            ids = await self._encode(body.prompt, body.add_special_tokens is not False)
        else:
            raise BadRequest("prompt: expected a text, or messages in its place", param="body.prompt")
        texts = [self._tokenizer.piece(token_id) for token_id in ids] if body.return_token_strs else None
        facts = {"count": len(ids), "max_model_len": self.config.max_model_len, "tokens": ids, "token_strs": texts}
        return _reply(facts)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = openai.read(Detokenize, await _json_body(request))
        self._check_model(body.model)
        for token_id in body.tokens:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise BadRequest(
                    f"Token id {token_id} is out of vocabulary (of {self._tokenizer.vocab_size})", param="tokens"
                )
        return _reply({"prompt": self._tokenizer.decode(body.tokens)})

    # -- the rest

    async def models(self, request: web.Request) -> web.StreamResponse:
        cards: list[JSON] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "kvferry",
                "root": self.config.names[0],
                "parent": None,
                "max_model_len": self.config.max_model_len,
                "permission": [],
            }
            for name in self.config.names
        ]
        return _reply({"object": "list", "data": cards})

    async def settings(self, request: web.Request) -> web.StreamResponse:
        """For a render tier; a folder's vocabulary takes a moment to hash."""
        told = await asyncio.to_thread(settings_of, self.config, self._tokenizer)
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.engine.death is None else 503)

    async def exposition(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: web.Request) -> web.StreamResponse:
        return _reply({"version": version("kvferry")})

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """`request_ids`: as in replies, or with vLLM's number of the prompt behind; without any, all are meant."""
        wanted = openai.read(Abort, await request.read() or b"{}").request_ids
        found = [
            engine_id
            for engine_id in self._choices
            if not wanted or any(engine_id == name or _belongs(engine_id, name) for name in wanted)
        ]
        for engine_id in found:
            self._abort(engine_id)
        return _reply({"status": "aborted", "aborted": len(found)})

    async def abort_some(self, request: web.Request) -> web.StreamResponse:
        if openai.read(Abort, await request.read()).request_ids is None:
            raise BadRequest("Missing 'request_ids' in request body", param="request_ids", kind="Bad Request")
        await self.abort(request)
        return web.Response(status=200)

    async def fault(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            fault = json.loads(raw)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(fault, dict):
            raise BadRequest("the body must be a JSON object")
        try:
            await asyncio.to_thread(self.engine.inject, fault)
        except ConfigError as error:
            raise BadRequest(str(error)) from None
        except TimeoutError:
            return _failed("the engine did not come to the end of a step in time")
        return _reply({"status": "ok"})

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_post(openai.COMPLETIONS, self.completions)
        app.router.add_post(openai.CHAT, self.chat)
        app.router.add_post(openai.RESPONSES, self.responses)
        app.router.add_get(openai.RESPONSES + "/{id}", self.no_response)
        app.router.add_post(openai.RESPONSES + "/{id}/cancel", self.no_response)
        app.router.add_post(openai.GENERATE, self.generate)
        app.router.add_route("*", "/ping", self.ping)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/abort_requests", self.abort)
        app.router.add_post("/inference/v1/abort_requests", self.abort_some)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get(SETTINGS, self.settings)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.exposition)
        app.router.add_get("/version", self.version)
        if self.config.faults:
            app.router.add_post("/fault", self.fault)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guarded = request.path.startswith(GUARDED) and request.path != SETTINGS
        if self.config.api_keys and guarded and not self._allowed(request):
            return web.Response(status=401, body=b'{"error":"Unauthorized"}', content_type="application/json")
        try:
            return await handler(request)
        except BadRequest as error:
            body = error_body(str(error), error.kind, error.http_status, error.param)
            return web.Response(status=error.http_status, body=body, content_type="application/json")
        except KVFerryError as error:
            return _failed(str(error))
        except web.HTTPException as error:
            body = error_body(error.reason, error.reason, error.status)
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return web.Response(status=error.status, body=body, content_type="application/json", headers=allow)

    def _allowed(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        keys = [key.encode() for key in self.config.api_keys]
        return scheme.lower() == "bearer" and any([hmac.compare_digest(given.encode(), key) for key in keys])


def _belongs(engine_id: str, name: str) -> bool:
    """`name` is the id of the reply, or of one prompt's request, that this engine request is a part of."""
    own = engine_id.partition("_")[2] if engine_id.partition("_")[0].isdecimal() else engine_id
    return own[:-9] == name or (own[:-9].rpartition("-")[0] == name and name.startswith("cmpl-"))


def _reply(facts: JSON) -> web.Response:
    return web.Response(body=encode(facts), content_type="application/json")


def _failed(message: str) -> web.Response:
    return web.Response(
        status=500, body=error_body(message, "InternalServerError", 500), content_type="application/json"
    )


async def _json_body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        raise BadRequest("Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request")
    return await request.read()


def _request_id(request: web.Request, default: str | None) -> str:
    return request.headers.get("X-Request-Id") or default or uuid.uuid4().hex


def _priority(request: web.Request, default: int) -> int:
    try:
        return int(request.headers.get(PRIORITY_HEADER, ""))
    except ValueError:
        return default
