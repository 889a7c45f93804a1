"""Request bodies, as vLLM's server reads them: what is of the wrong type or out of range is refused by name, unknown
fields pass, and settings of a sampler that this engine does not have are checked and not used. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from kvferry.connector.params import parse
from kvferry.engine.request import Sampling
from kvferry.engine.text import Chat, flat
from kvferry.errors import ConfigError

Body = TypeVar("Body")
Route = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"]
COMPLETIONS: Route = "/v1/completions"
CHAT: Route = "/v1/chat/completions"
RESPONSES: Route = "/v1/responses"
GENERATE: Route = "/inference/v1/generate"

MAX_N = 16384
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
"""Of completions; a chat may fill the model's length."""


class BadRequest(ConfigError):
    """`kind` and `param`: the fields `type` and `param` of OpenAI's error."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.http_status = status
        self.kind = kind
        self.param = param


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take."""

    model: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    request_id: str | None = None
    priority: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    use_beam_search: bool = False


class Completion(Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    add_special_tokens: bool = True


class ChatCompletion(Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    request_ids: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the reply must be like. `logprobs`: how many alternatives per token, None for no logprobs at all.
    `only_prompt`: the client wants its prompt back and nothing generated. `interval`: tokens per stream event.
    """

    route: Route
    n: int
    stream: bool
    usage: bool
    continuous_usage: bool
    interval: int
    stops: tuple[str, ...]
    include_stop: bool
    echo: bool
    only_prompt: bool
    logprobs: int | None
    prompt_logprobs: bool
    token_ids: bool
    names_as_ids: bool
    prompt_text: bool
    skip_special: bool


_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
_PLACE = re.compile(r" - at `\$\.([^`]*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def read(kind: type[Body], raw: bytes) -> Body:
    """Raises `BadRequest` naming the field."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind, strict=False)
    try:
        body: Body = _decoders[kind].decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        missing = _MISSING.search(text)
        field = place.group(1) if place else missing.group(1) if missing else ""
        said = f"{field}: {text[: place.start()]}" if place else text
        raise BadRequest(said, param=f"body.{field}" if field else "body", kind="Bad Request") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body", kind="Bad Request") from None
    return body


def read_completion(raw: bytes) -> Completion:
    body = read(Completion, raw)
    check_completion(body)
    return body


def check_completion(body: Completion) -> None:
    """Raises `BadRequest`."""
    _check(body)
    _non_negative("logprobs", body.logprobs)
    if body.prompt_embeds is not None:
        raise BadRequest("prompt_embeds are not supported, send text or token ids", param="prompt_embeds")
    if body.suffix is not None:
        raise BadRequest("suffix is only supported for models with FIM completion rendering", param="suffix")


def read_chat(raw: bytes) -> ChatCompletion:
    body = read(ChatCompletion, raw)
    check_chat(body)
    return body


def check_chat(body: ChatCompletion) -> None:
    """Raises `BadRequest`."""
    _check(body)
    _non_negative("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")


def _check(body: Common) -> None:
    """What both routes refuse."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise BadRequest(f"n must be at least 1, got {n}.", param="n")
    if n > MAX_N:
        raise BadRequest(f"n must be at most {MAX_N}, got {n}.", param="n")
    if n > 1 and body.temperature is not None and 0 <= body.temperature < 1e-5:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {n}.", param="n")
    if body.use_beam_search:
        raise BadRequest(
            "use_beam_search is not supported", param="use_beam_search", status=501, kind="NotImplementedError"
        )
    if body.stream_options is not None and not body.stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.stream_interval is not None and body.stream_interval < 1:
        raise BadRequest(f"stream_interval must be at least 1, got {body.stream_interval}.", param="stream_interval")
    if body.prompt_logprobs is not None:
        if body.stream and (body.prompt_logprobs > 0 or body.prompt_logprobs == -1):
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        _non_negative("prompt_logprobs", body.prompt_logprobs)
    if body.min_tokens < 0:
        raise BadRequest(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.", param="min_tokens")
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("min_p", 0.0, 1.0),
    ):
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be in [{low:g}, {high:g}], got {value}.", param=name)
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise BadRequest(f"top_p must be in (0, 1], got {body.top_p}.", param="top_p")
    if body.top_k is not None and body.top_k < -1:
        raise BadRequest(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.", param="top_k")
    if any(not stop for stop in _stops(body)):
        raise BadRequest("stop cannot contain an empty string.", param="stop")
    try:
        parse(body.kv_transfer_params)
    except ConfigError as error:
        raise BadRequest(str(error), param="kv_transfer_params") from None


def _non_negative(name: str, value: int | None) -> None:
    if value is not None and value < -1:
        raise BadRequest(f"`{name}` must be a positive value or -1.", param=name)


def _stops(body: Common) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def ask_of(body: Completion | ChatCompletion) -> Ask:
    options = body.stream_options or StreamOptions()
    chat = isinstance(body, ChatCompletion)
    logprobs: int | None
    if isinstance(body, ChatCompletion):
        logprobs = body.top_logprobs or 0 if body.logprobs else None
    else:
        logprobs = body.logprobs
    return Ask(
        route=CHAT if chat else COMPLETIONS,
        n=body.n or 1,
        stream=bool(body.stream),
        usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        interval=body.stream_interval or 1,
        stops=_stops(body),
        include_stop=body.include_stop_str_in_output,
        echo=bool(body.echo),
        only_prompt=bool(not chat and body.echo and body.max_tokens == 0),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None or (bool(body.echo) and (chat or logprobs is not None)),
        token_ids=bool(body.return_token_ids),
        names_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_text=bool(isinstance(body, ChatCompletion) and body.return_prompt_text),
        skip_special=body.skip_special_tokens,
    )


def prompts_of(body: Completion) -> list[str | list[int]]:
    """One prompt or several, each as text or as token ids. Raises `BadRequest`."""
    prompt = body.prompt
    if prompt is None or prompt == "":
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[str | list[int]] = [item for item in prompt if not isinstance(item, int)]
    if not prompts:
        ids = [item for item in prompt if isinstance(item, int)]
        return [ids] if ids else []
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        names = "', '".join(sorted(kind.__name__ for kind in kinds))
        raise BadRequest(
            f"prompt: expected text, texts, token ids, or lists of token ids, got a list of '{names}'",
            param="body.prompt",
            kind="Bad Request",
        )
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}.", param="prompt"
        )
    return prompts


def chat_of(body: ChatCompletion | Tokenize) -> Chat:
    """Raises `BadRequest` for messages that no text can be made of."""
    messages = body.messages or []
    if not messages:
        raise BadRequest("messages: expected at least one", param="messages")
    for at, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{at}].role: expected a string", param=f"messages[{at}].role")
        _check_content(f"messages[{at}].content", message.get("content"))
    if body.chat_template is not None:
        raise BadRequest("a chat template in the request is not accepted", param="chat_template")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatCompletion):
        for name in ("documents", "reasoning_effort"):
            if getattr(body, name) is not None:
                variables[name] = getattr(body, name)
    return Chat(
        messages=messages,
        tools=body.tools,
        generation_prompt=body.add_generation_prompt,
        continue_final=body.continue_final_message,
        variables=variables,
    )


def _check_content(where: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(content, list) or not isinstance(text, str):
            kind = part.get("type", "object") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"{where}: expected text, got {kind!r}; this engine is text-only", param=where)


def role_and_echo(body: ChatCompletion) -> tuple[str, str]:
    """The role that answers, and the last message's text if the answer is to continue it (`echo`)."""
    last = body.messages[-1]
    role = "assistant" if body.add_generation_prompt else str(last["role"])
    return role, flat(last.get("content")) if body.echo and last["role"] == role else ""


def fit_prompt(body: Common, prompt: list[int], *, of_text: bool, max_model_len: int, vocab_size: int) -> list[int]:
    """The prompt, truncated if that was asked for. Raises `BadRequest` if it is empty, foreign, or too long."""
    limit = body.truncate_prompt_tokens
    if limit is not None:
        if limit < -1 or limit > max_model_len:
            raise BadRequest(
                f"truncate_prompt_tokens={limit} cannot be greater than max_model_len = {max_model_len}, or below -1. "
                "Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        keep = max_model_len - 1 if limit == -1 else limit
        prompt = prompt[:keep] if body.truncation_side == "right" else prompt[max(0, len(prompt) - keep) :]
    length = len(prompt)
    if not length:
        raise BadRequest("The decoder prompt cannot be empty", param="prompt")
    if not of_text and (max(prompt) >= vocab_size or min(prompt) < 0):
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < vocab_size)
        raise BadRequest(f"Token id {wrong} is out of vocabulary (of {vocab_size})", param="prompt")
    if length > max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {length} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={length})",
            param="input_tokens",
        )
    if length == max_model_len:
        raise BadRequest(
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {max_model_len}. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    return prompt


def sampling_of(
    body: Completion | ChatCompletion, ask: Ask, prompt_len: int, max_model_len: int, priority: int
) -> Sampling:
    """What ends a request with a prompt of this length. Raises `BadRequest`."""
    name, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatCompletion):
        if body.max_completion_tokens is not None:
            name, wanted = "max_completion_tokens", body.max_completion_tokens
    elif wanted is None:
        wanted = DEFAULT_MAX_TOKENS
    if wanted is not None and wanted > max_model_len:
        raise BadRequest(
            f"{name}={wanted} cannot be greater than max_model_len={max_model_len}. Please request fewer output "
            f"tokens. (parameter={name}, value={wanted})",
            param=name,
        )
    if ask.only_prompt:
        wanted = 1
    if wanted is not None and wanted < 1:
        raise BadRequest(f"{name} must be at least 1, got {wanted}. (parameter={name}, value={wanted})", param=name)
    room = max_model_len - prompt_len
    max_tokens = room if wanted is None else min(wanted, room)
    if body.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.",
            param="min_tokens",
        )
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        priority=priority,
    )
