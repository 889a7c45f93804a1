"""The few edits of a reply that was not streamed: what P knows better than D. Pure.

D counts tokens that it received as cached, so `cached_tokens` is P's; `prompt_logprobs` only P has. Where nothing
differs the reply stays the bytes that D sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvferry.router.requests import usage
from kvferry.router.requests.echo import Echo
from kvferry.router.requests.edits import dump
from kvferry.router.requests.openai import CHAT, GENERATE, PROMPT_SCORES, Body, Plan


def finish(
    plan: Plan, decode: Sequence[bytes], prefill: Sequence[Body | None], echoes: Sequence[Echo | None] = ()
) -> bytes:
    """The client's body from the parts' replies: `decode[i]` as D sent it, `prefill[i]` as P's reply, None if none;
    `echoes[i]`: what goes before each choice of it."""
    replies = [_parse(raw) for raw in decode]
    if any(reply is None for reply in replies):
        return decode[0]
    bodies = [reply for reply in replies if reply is not None]
    edited = [_edit(plan, body, reply) for body, reply in zip(bodies, prefill, strict=True)]
    for body, echo in zip(bodies, echoes, strict=False):
        if echo is not None:
            edited.append(True)
            for choice in body.get("choices") or ():
                echo.whole(choice)
    if len(bodies) > 1:
        return dump(_join(bodies))
    return dump(bodies[0]) if any(edited) else decode[0]


def _edit(plan: Plan, body: Body, prefill: Body | None) -> bool:
    edited = False
    if body.get("kv_transfer_params") is not None:
        body["kv_transfer_params"] = None
        edited = True
    if prefill is None:
        return edited
    edited = usage.correct(body, prefill) or edited
    if plan.prompt_logprobs is not None:
        edited = True
        if plan.route == GENERATE:
            body |= {key: prefill[key] for key in (*PROMPT_SCORES, "prompt_token_id_logprobs") if key in prefill}
        elif plan.route == CHAT:
            body["prompt_logprobs"] = prefill.get("prompt_logprobs")
        else:
            first: Body = next(iter(prefill.get("choices") or ()), {})
            for choice in body.get("choices") or ():
                choice["prompt_logprobs"] = first.get("prompt_logprobs")
    return edited


def _join(bodies: list[Body]) -> Body:
    """One reply for several prompts: choices in the prompts' order, counts summed."""
    joined = dict(bodies[0])
    choices = [choice for body in bodies for choice in body.get("choices") or ()]
    joined["choices"] = [choice | {"index": index} for index, choice in enumerate(choices)]
    usages = [body["usage"] for body in bodies if isinstance(body.get("usage"), dict)]
    if usages:
        joined["usage"] = total(usages)
    return joined


def total(items: list[Any]) -> Any:
    """Of numbers, and of objects of numbers, key by key; anything else: the first."""
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        return sum(items)
    present = [item for item in items if item is not None]
    if present and all(isinstance(item, dict) for item in present):
        keys = {key: None for item in present for key in item}
        return {key: total([item[key] for item in present if key in item]) for key in keys}
    return items[0]


def _parse(raw: bytes) -> Body | None:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
