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
Route = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: Route = "/v1/completions"
CHAT: Route = "/v1/chat/completions"

UNTRUSTED = ("kv_transfer_params", "ec_transfer_params")
"""Name peers and addresses to an engine: only the router may (C35, C67)."""
_CARRIERS = ("vllm_xargs", "extra_args", "sampling_params")
"""Objects, in a request and in one another, out of which an engine takes such names."""

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


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks for. `parts`: one body per transfer, as D gets it save for the transfer's parameters."""

    route: Route
    model: str | None
    stream: bool
    n: int = 1
    prompt_logprobs: int | None = None
    parts: tuple[Body, ...]
    plain: bool = True
    """See `wire.loads`."""


def untouched(route: Route, body: object, plain: bool = True) -> Plan:
    """The plan of a request that one engine answers alone."""
    clean = sanitised(_object(body))
    return Plan(route=route, model=_model(clean), stream=bool(clean.get("stream")), parts=(clean,), plain=plain)


def read(route: Route, body: object, plain: bool = True) -> Plan:
    """Raises `Refusal`: 400 for what is no request, 501 for what this version cannot answer like one engine."""
    clean = sanitised(_object(body))
    stream = bool(clean.get("stream"))
    _refuse(route, clean, stream)
    prompt_logprobs = clean.pop("prompt_logprobs", None)
    n = clean.get("n")
    prompts = _prompts(clean) if route == COMPLETIONS else []
    if len(prompts) > 1 and stream:
        raise _unsupported(
            "prompt", "several prompts (`prompt`) in one streamed request", "send one request per prompt"
        )
    parts = tuple(clean | {"prompt": prompt} for prompt in prompts) if len(prompts) > 1 else (clean,)
    return Plan(
        route=route,
        model=_model(clean),
        stream=stream,
        n=n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1,
        prompt_logprobs=None if stream else prompt_logprobs,
        parts=parts,
        plain=plain,
    )


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
    body["max_tokens"] = 1
    if plan.route == CHAT:
        body["max_completion_tokens"] = 1
    if "n" in body:
        body["n"] = 1
    body["stream"] = False
    body["ignore_eos"] = True
    # null, not "none": it renders the tools whatever --exclude-tools-when-tool-choice-none says, needs no tool parser
    # and forces no call. A client's "none" stays, because that option drops the tools on D as well. (Of the engine's
    # renderers, Kimi-K3's alone shows "required" or a named function to the model: there the legs would differ.)
    if body.get("tools") and body.get("tool_choice", "auto") != "none":
        body["tool_choice"] = None
        body.pop("parallel_tool_calls", None)
    if plan.prompt_logprobs is not None:
        body["prompt_logprobs"] = plan.prompt_logprobs
    body["kv_transfer_params"] = params
    return body


def _object(body: object) -> Body:
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _model(body: Body) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_value", "`model` must be a string", param="model")
    return model


def decode_body(part: Body, params: Body | None) -> Body:
    """D's leg of one part: the client's, and the transfer's parameters."""
    return part if params is None else part | {"kv_transfer_params": params}


def _prompts(body: Body) -> list[Any]:
    """The prompts of a completions request that are to be split; [] where there is one (or none that is valid)."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2:
        return []
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    return []


def _refuse(route: Route, body: Body, stream: bool) -> None:
    if body.get("use_beam_search"):
        raise _unsupported("use_beam_search", "`use_beam_search`", "the engine would compute the prompt again on D")
    if body.get("prompt_embeds") is not None:
        raise _unsupported("prompt_embeds", "`prompt_embeds`", "send text or token ids")
    if body.get("echo"):
        if route == CHAT:
            raise _unsupported("echo", "`echo` in a chat", "leave it out")
        if body.get("logprobs") is not None:
            raise _unsupported("echo", "`echo` together with `logprobs`", "leave one of them out")
    wanted = body.get("prompt_logprobs")
    if stream and isinstance(wanted, int | float) and (wanted > 0 or wanted == -1):
        raise Refusal(
            400,
            "invalid_value",
            "`prompt_logprobs` are not available when `stream=True`.",
            param="prompt_logprobs",
        )


def _unsupported(param: str, what: str, hint: str) -> Refusal:
    return Refusal(
        501, "not_supported", f"{what} cannot be served through a prefill/decode pair yet", param=param, hint=hint
    )
