"""One client request -> the bodies of its legs. Pure: JSON objects in, JSON objects out.

P must render the same prompt token ids as D and do nothing else: it makes one token that nobody reads, so whatever
constrains, stops, reports or parses that token is taken away, and whatever a chat template may see stays. D gets what
the client sent. A request that would need data from P that is not merged is refused by name, never answered wrong.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.router.replies import Refusal

Body = dict[str, Any]
Route = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"]
COMPLETIONS: Route = "/v1/completions"
CHAT: Route = "/v1/chat/completions"
RESPONSES: Route = "/v1/responses"
GENERATE: Route = "/inference/v1/generate"
ROUTES: tuple[Route, ...] = (COMPLETIONS, CHAT, RESPONSES, GENERATE)

UNTRUSTED = ("kv_transfer_params", "ec_transfer_params")
"""Name peers and addresses to an engine: only the router may (C35, C67)."""
_CARRIERS = ("vllm_xargs", "extra_args", "sampling_params")
"""Objects, in a request and in one another, out of which an engine takes such names."""

ECHO_FIELDS = ("logprobs", "logprob_token_ids", "return_tokens_as_token_ids")

NOT_FOR_PREFILL = (
    # streams and limits
    "stream_options",
    "stream_interval",
    "min_tokens",
    "best_of",
    # sampling: the one token of P is not used, and a seeded generator costs (some engines fail on it mid-prompt)
    "seed",
    # ends: P ends by its length, always
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "repetition_detection",
    "thinking_token_budget",
    # constraints that no chat template sees (`response_format` is seen by some, so it stays)
    "structured_outputs",
    # reports about tokens
    "echo",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
)


PROMPT_SCORES = ("prompt_logprobs", "prompt_logprob_token_ids")
"""Of `sampling_params`: what only the engine that computes the prompt can tell."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks for. `parts`: one body per transfer, as D gets it save for the transfer's parameters.

    `echo`: the prompt's logprobs come before the answer's; P makes them, the reply is merged. `usage`: a stream ends
    with the counts. `alone`: nothing is to be decoded, P answers without a transfer. `fields`: how many there
    are in the client's body. `rendered`: a render session takes the tokens, and P's words beside them.
    """

    route: Route
    model: str | None
    stream: bool
    n: int = 1
    prompt_logprobs: Any = None
    echo: bool = False
    usage: bool = False
    alone: bool = False
    fields: int = 0
    begins: bool = False
    """P's token may be the answer's first; see `first_token.py`."""
    rendered: bool = False
    parts: tuple[Body, ...]
    plain: bool = True
    """See `wire.loads`."""


def untouched(route: Route, body: object, plain: bool = True) -> Plan:
    """The plan of a request that one engine answers alone."""
    clean = sanitised(_object(body))
    fields = len(_object(body))
    return Plan(
        route=route,
        model=_model(clean),
        stream=bool(clean.get("stream")),
        fields=fields,
        parts=(clean,),
        plain=plain,
    )


def read(route: Route, body: object, plain: bool = True) -> Plan:
    """Raises `Refusal`: 400 for what is no object, 501 for what no pair can answer like one engine."""
    return msgspec.structs.replace(_read(route, body), fields=len(_object(body)), plain=plain)


def _read(route: Route, body: object) -> Plan:
    clean = sanitised(_object(body))
    stream, model = bool(clean.get("stream")), _model(clean)
    _refuse(route, clean)
    options = clean.get("stream_options")
    usage = route == RESPONSES or (isinstance(options, dict) and bool(options.get("include_usage")))
    if route == GENERATE:
        return _read_generate(clean, model, stream, usage)
    if route == COMPLETIONS and clean.get("echo") and clean.get("max_tokens") == 0:
        return Plan(route=route, model=model, stream=stream, usage=usage, alone=True, parts=(clean,))
    echo = route == COMPLETIONS and bool(clean.get("echo")) and clean.get("logprobs") is not None
    prompts = _prompts(clean) if route == COMPLETIONS else []
    if route != RESPONSES:
        prompt_logprobs = clean.pop("prompt_logprobs", None)
        if stream and prompt_logprobs == 0:
            prompt_logprobs = None  # allowed, and not shown
    else:
        prompt_logprobs = None
    return Plan(
        route=route,
        model=model,
        stream=stream,
        n=_count(clean.get("n")),
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        usage=usage,
        parts=tuple(clean | {"prompt": [prompt]} for prompt in prompts) if len(prompts) > 1 else (clean,),
    )


def _read_generate(clean: Body, model: str | None, stream: bool, usage: bool) -> Plan:
    sampling = clean.get("sampling_params")
    n, prompt_logprobs = 1, None
    if isinstance(sampling, dict):
        n = _count(sampling.get("n"))
        kept = {key: value for key, value in sampling.items() if key not in PROMPT_SCORES}
        prompt_logprobs = {key: sampling[key] for key in PROMPT_SCORES if sampling.get(key) is not None} or None
        clean = clean | {"sampling_params": kept}
    return Plan(
        route=GENERATE,
        model=model,
        stream=stream,
        n=n,
        prompt_logprobs=prompt_logprobs,
        usage=usage,
        parts=(clean,),
    )


def _count(n: object) -> int:
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1


def sanitised(body: Body) -> Body:
    """A copy without what a client must not say."""
    clean = {key: value for key, value in body.items() if key not in UNTRUSTED}
    for name in _CARRIERS:
        inner = clean.get(name)
        if isinstance(inner, dict):
            clean[name] = sanitised(inner)
    return clean


def prefill_body(plan: Plan, part: Body, params: Body) -> Body:
    """P's leg of one part."""
    body = {key: value for key, value in part.items() if key not in NOT_FOR_PREFILL}
    body["stream"] = False
    body["kv_transfer_params"] = params
    if plan.route == GENERATE:
        return _prefill_generate(plan, body)
    if plan.route == RESPONSES:
        return _prefill_responses(body)
    body["max_tokens"] = 1
    if plan.route == CHAT:
        body["max_completion_tokens"] = 1
    if "n" in body:
        body["n"] = 1
    body["ignore_eos"] = True
    # null, not "none": it renders the tools whatever --exclude-tools-when-tool-choice-none says, needs no tool parser
    # and forces no call. A client's "none" stays, because that option drops the tools on D as well. (Of the engine's
    # renderers, Kimi-K3's alone shows "required" or a named function to the model: there the legs would differ.)
    if body.get("tools") and body.get("tool_choice", "auto") != "none":
        body["tool_choice"] = None
        body.pop("parallel_tool_calls", None)
    if plan.echo:
        body |= {key: part[key] for key in ("echo", *ECHO_FIELDS) if key in part}
    if plan.prompt_logprobs is not None:
        body["prompt_logprobs"] = plan.prompt_logprobs
        # Prompt logprobs of a stream are an error, and it is P that must say so: D is never asked for them.
        body["stream"] = plan.stream
    return body


def _prefill_generate(plan: Plan, body: Body) -> Body:
    """The limits are in `sampling_params`; what is no object there stays, for the engine to refuse."""
    body.pop("output_mode", None)
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        kept = {key: value for key, value in sampling.items() if key not in NOT_FOR_PREFILL}
        body["sampling_params"] = kept | {"max_tokens": 1, "ignore_eos": True} | ({"n": 1} if "n" in kept else {})
        if plan.prompt_logprobs is not None:
            body["sampling_params"] |= plan.prompt_logprobs
            body["stream"] = plan.stream and "prompt_logprob_token_ids" in plan.prompt_logprobs
    return body


def _prefill_responses(body: Body) -> Body:
    for key in ("background", "include", "enable_response_messages"):
        body.pop(key, None)
    text = body.get("text")
    if isinstance(text, dict) and "format" in text:
        body["text"] = {key: value for key, value in text.items() if key != "format"}
    if body.get("tool_choice", "auto") not in ("none", "auto"):
        body["tool_choice"] = "auto"
    return body | {"max_output_tokens": 1, "store": False, "ignore_eos": True}


def _object(body: object) -> Body:
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _model(body: Body) -> str | None:
    """None also where it is no string: the engine says what is wrong with it."""
    model = body.get("model")
    return model if isinstance(model, str) else None


def decode_body(plan: Plan, part: Body, params: Body | None) -> Body:
    """D's leg of one part: the client's, and the transfer's parameters. `params` None: D computes the prompt itself."""
    if params is None:
        if plan.prompt_logprobs is None:
            return part
        if plan.route == GENERATE:
            scored = part | {"sampling_params": part["sampling_params"] | plan.prompt_logprobs}
            if plan.rendered:  # a stream of tokens has no place for the scores
                scored = {key: value for key, value in scored.items() if key != "stream_options"} | {"stream": False}
            return scored
        return part | {"prompt_logprobs": plan.prompt_logprobs}
    body = part | {"kv_transfer_params": params}
    if plan.echo:
        # D would compute the prompt's logprobs anew. Its ids are those that one engine shows beside an echo.
        body = {key: value for key, value in body.items() if key != "echo"} | {"return_token_ids": True}
    return body


def _prompts(body: Body) -> list[Any]:
    """The prompts of a completions request that are to be split; [] where there is one (or none that is valid)."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2:
        return []
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    return []


def _refuse(route: Route, body: Body) -> None:
    if body.get("use_beam_search"):
        raise _unsupported("use_beam_search", "`use_beam_search`", "the engine would compute the prompt again on D")
    if body.get("prompt_embeds") is not None:
        raise _unsupported("prompt_embeds", "`prompt_embeds`", "send text or token ids")
    if route == RESPONSES:
        if body.get("previous_response_id") is not None:
            raise _unsupported(
                "previous_response_id",
                "`previous_response_id`",
                "the prefill engine doesn't have what another engine stored: send the whole conversation as `input`",
            )
        if body.get("background"):
            raise _unsupported("background", "`background`", "nobody would hold the transfer: ask with `stream`")


def _unsupported(param: str, what: str, hint: str) -> Refusal:
    return Refusal(
        501, "not_supported", f"{what} cannot be served through a prefill/decode pair", param=param, hint=hint
    )
