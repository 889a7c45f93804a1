"""P's own first token as the answer's first (`--first-token prefill`): when it may be, and what D is asked then. Pure.

P has sampled that token as D would have: its leg gets the client's sampling, one token of it. D gets the prompt with
that token behind it and makes the rest, so whatever D would have to remember of the token (penalties, a grammar, a
seeded generator, text that a stop string may begin in) forbids it. Only `/inference/v1/generate` speaks of tokens on
both legs.

What isn't known here is taken to forbid it too: a field of a request, or of P's choice, that a later engine has.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

import msgspec

from kvferry.router.requests.edits import DONE, dump
from kvferry.router.requests.openai import GENERATE, Body, Plan

EVENT_STREAM = "text/event-stream; charset=utf-8"
MARKER = b'"prompt_tokens"'
"""In every event that counts tokens."""
SPANS = b'"weight_versions":['
"""In the last event of a choice, of engines that tell which weights made which token."""
ENDED = "the answer ended with its first token"

_FIELDS = frozenset(
    (
        "model",
        "token_ids",
        "sampling_params",
        "stream",
        "stream_options",
        "request_id",
        "return_token_ids",
        "cache_salt",
        "priority",
        # read by the router alone
        "user",
        "user_id",
        "session_id",
        "session_params",
    )
)
_FREE = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "logprob_token_ids",
        "logit_bias",
        "allowed_token_ids",
        # of the cache
        "skip_reading_prefix_cache",
        # of text, which nobody makes of these tokens
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        # looked at below
        "max_tokens",
        "min_tokens",
        "seed",
    )
)
"""Of `sampling_params`: what each token is sampled by, whatever came before it in the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ("", []),
    "bad_words": ([],),
}
"""What switches it off; else the token would have to be known as one of the answer."""
_OF_ALL_TOKENS = ("routed_experts", "sampling_mask")
"""Of a choice: what can't be joined from two engines' parts."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """P's reply, whose one token opens the answer. `last`: and ends it. `prompt`: tokens of it."""

    reply: Body
    choice: Body
    token: int
    prompt: int
    last: bool


def planned(plan: Plan) -> Plan:
    """With `begins` where P's token may be the first, and `alone` where it is all that is asked for."""
    if plan.route != GENERATE:
        return plan
    sampling = plan.parts[0].get("sampling_params")
    if not isinstance(sampling, dict):
        return plan
    limit = sampling.get("max_tokens")
    if _is_count(limit) and limit == 1:
        return msgspec.structs.replace(plan, begins=True, alone=True)
    if not _is_count(limit) or limit < 2 or (plan.stream and plan.prompt_logprobs is not None):
        return plan  # an absent limit is D's own, and D counts from its first token
    return msgspec.structs.replace(plan, begins=True) if _free(plan.parts[0], sampling) else plan


def _free(part: Body, sampling: Body) -> bool:
    if any(value is not None and name not in _FIELDS for name, value in part.items() if name != "output_mode"):
        return False
    if part.get("output_mode", "tokens") != "tokens" or not isinstance(part.get("token_ids"), list):
        return False
    for name, value in sampling.items():
        if value is not None and name not in _FREE and value not in _NEUTRAL.get(name, ()):
            return False
    if sampling.get("min_tokens") not in (None, 0, 1):
        return False
    greedy = sampling.get("temperature") == 0
    return sampling.get("seed") is None or greedy


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def prefill_body(plan: Plan, part: Body, params: Body) -> Body:
    """P's leg: the client's request for one token, unstreamed. A greedy one needs no seed."""
    body = {key: value for key, value in part.items() if key not in ("stream", "stream_options")}
    sampling = {key: value for key, value in part["sampling_params"].items() if key != "seed"}
    body["sampling_params"] = sampling | {"max_tokens": 1} | (plan.prompt_logprobs or {})
    return body | {"stream": False, "kv_transfer_params": params}


def opening(plan: Plan, part: Body, reply: Body) -> Opening | None:
    """None: P's reply is no such beginning, and D makes the whole answer."""
    choices, usage = reply.get("choices"), reply.get("usage")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    choice, ids = choices[0], choices[0].get("token_ids")
    if not isinstance(ids, list) or len(ids) != 1 or not _is_count(ids[0]) or not isinstance(usage, dict):
        return None
    last, prompt = choice.get("finish_reason") == "stop", len(part["token_ids"])
    if not last and choice.get("finish_reason") != "length":
        return None
    if not last and (usage.get("prompt_tokens") != prompt or any(choice.get(name) for name in _OF_ALL_TOKENS)):
        return None
    if not last and not _are_spans(choice.get("weight_versions") or []):
        return None
    wants_logprobs = part["sampling_params"].get("logprobs") is not None
    if wants_logprobs and not _content(choice):
        return None
    return Opening(reply=reply, choice=choice, token=ids[0], prompt=prompt, last=last)


def fits(part: Body, limit: int | None) -> bool:
    """D may be asked for the rest: its own limit of a request's tokens is known, and neither cuts this one short nor
    turns it down, which D would say otherwise of a prompt that is longer by one."""
    asked = part["sampling_params"]["max_tokens"]
    return limit is not None and len(part["token_ids"]) + int(asked) <= limit


def decode_part(part: Body, token: int) -> Body:
    """What D is asked: the rest of the answer. The prompt's ids, if they are wanted back, are P's to tell."""
    body = {key: value for key, value in part.items() if key != "return_token_ids"}
    sampling = {key: value for key, value in part["sampling_params"].items() if key != "min_tokens"}
    sampling["max_tokens"] = part["sampling_params"]["max_tokens"] - 1
    return body | {"token_ids": [*part["token_ids"], token], "sampling_params": sampling}


def events(part: Body, begun: Opening) -> bytes:
    """The beginning of a stream: the token's event, and, where the answer ends with it, the rest of its events."""
    reply, options = begun.reply, part.get("stream_options")
    include = isinstance(options, dict) and bool(options.get("include_usage"))
    counts = _counts(begun) if include and isinstance(options, dict) and options.get("continuous_usage_stats") else None
    first: Body = {"request_id": reply.get("request_id"), "usage": counts, "output_mode": "tokens"}
    if part.get("return_token_ids"):
        told = ("prompt_token_ids", "mm_placeholders")
        first |= {name: reply[name] for name in told if reply.get(name) is not None}
    untold = {name: None for name in ("finish_reason", "weight_versions") if name in begun.choice}
    first["choices"] = [begun.choice if begun.last else begun.choice | untold]
    out = [first]
    if begun.last and include:
        usage = _without_nulls(reply["usage"])
        out.append({"request_id": reply.get("request_id"), "usage": usage, "output_mode": "tokens", "choices": []})
    told_all = b"".join(b"data: " + dump(event) + b"\n\n" for event in out)
    return told_all + DONE + b"\n\n" if begun.last else told_all


def _counts(begun: Opening) -> Body:
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {"prompt_tokens": begun.prompt, "total_tokens": begun.prompt + 1, "completion_tokens": 1} | details


def _without_nulls(facts: Body) -> Body:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in facts.items()
        if value is not None
    }


def recount(body: Body) -> bool:
    """D's counts in a reply or an event, in place: the token that it got as one of the prompt's is the answer's."""
    usage = body.get("usage")
    if not isinstance(usage, dict) or not _is_count(usage.get("prompt_tokens")):
        return False
    usage["prompt_tokens"] -= 1
    if _is_count(usage.get("completion_tokens")):
        usage["completion_tokens"] += 1
    return True


def respan(body: Body, begun: Opening) -> bool:
    """D's account of which weights made which token, in place: P's token stands before them."""
    changed = False
    for choice in body.get("choices") or ():
        theirs = choice.get("weight_versions") if isinstance(choice, dict) else None
        if not theirs or not _are_spans(theirs):
            continue
        spans = [dict(span) for span in begun.choice.get("weight_versions") or ()]
        for span in theirs:
            moved = span | {"start": span["start"] + 1, "end": span["end"] + 1}
            if spans and spans[-1].get("version") == moved.get("version"):
                spans[-1]["end"] = moved["end"]
            else:
                spans.append(moved)
        choice["weight_versions"] = spans
        changed = True
    return changed


def _are_spans(spans: object) -> bool:
    return isinstance(spans, list) and all(
        isinstance(span, dict) and _is_count(span.get("start")) and _is_count(span.get("end")) for span in spans
    )


def recounted(tokens: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The same of prompt and output tokens as D told them."""
    prompt, output = tokens
    return None if prompt is None else prompt - 1, None if output is None else output + 1


def joined(part: Body, begun: Opening, raw: bytes) -> bytes:
    """D's whole reply with P's token before it. What is no reply stays as it came."""
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        ids = choice["token_ids"]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return raw
    choice["token_ids"] = [begun.token, *(ids or ())]
    if choice.get("logprobs"):
        choice["logprobs"] = choice["logprobs"] | {"content": _content(begun.choice) + _content(choice)}
    if part.get("return_token_ids"):
        body |= {name: begun.reply.get(name) for name in ("prompt_token_ids", "mm_placeholders")}
    recount(body)
    respan(body, begun)
    return dump(body)


def _content(choice: Body) -> list[Any]:
    logprobs = choice.get("logprobs")
    found = logprobs.get("content") if isinstance(logprobs, dict) else None
    return found if isinstance(found, list) else []
