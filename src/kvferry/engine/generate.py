"""`/inference/v1/generate`, token ids in and out, in vLLM's shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from kvferry.engine.openai import GENERATE, Ask, BadRequest, Completion, StreamOptions, ask_of, check_completion
from kvferry.engine.replies import DONE, JSON, Piece, Prompt, Replies, Result, Usage, encode, event


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def completion_of(body: Generate, max_model_len: int) -> Completion:
    """The completion that it is but for its shape: without a limit of its own it may fill the model's length.

    Raises `BadRequest`.
    """
    if not body.token_ids:
        raise BadRequest(
            "List should have at least 1 item after validation", param="body.token_ids", kind="Bad Request"
        )
    if min(body.token_ids) < 0:
        raise BadRequest("token_ids must not contain negative values", param="body.token_ids", kind="Bad Request")
    limits = {"max_tokens": max(1, max_model_len - len(body.token_ids))} | body.sampling_params
    facts = limits | {
        "prompt": body.token_ids,
        "model": body.model,
        "stream": body.stream,
        "kv_transfer_params": body.kv_transfer_params,
        "request_id": body.request_id,
        "priority": body.priority,
    }
    try:
        completion = msgspec.convert(facts, Completion)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}", param="body.sampling_params", kind="Bad Request") from None
    check_completion(completion)
    return msgspec.structs.replace(completion, stream_options=body.stream_options)


def generate_ask(completion: Completion) -> Ask:
    """The ids are what is answered, so they are kept."""
    return replace(ask_of(completion), route=GENERATE, token_ids=True, echo=False)


class GenerateReplies(Replies):
    """`prompt_ids`: the client wants its prompt's ids back; `text`: the text beside the ids."""

    prompt_ids: bool = False
    text: bool = False

    def opening(self, index: int, prompt: Prompt) -> bytes:
        return b""

    def plain(self, index: int, prompt: Prompt) -> tuple[bytes, bytes] | None:
        return None

    def delta(self, piece: Piece) -> tuple[bytes, int]:
        facts: JSON = {"request_id": self._id, "usage": None, "output_mode": "text" if self.text else "tokens"}
        if piece.first and piece.index == 0 and self.prompt_ids:
            facts["prompt_token_ids"] = piece.prompt.token_ids
        if self.ask.continuous_usage:
            prompt_tokens = len(piece.prompt.token_ids)
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=piece.made, cached_tokens=0)
            facts["usage"] = usage.brief() | {"prompt_tokens_details": None, "completion_tokens_details": None}
        facts["choices"] = [self._one(piece)]
        return event(facts), piece.offset

    def closing(self, usage: Usage) -> bytes:
        if not self.ask.usage:
            return DONE
        said = usage.brief() | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
        mode = "text" if self.text else "tokens"
        return event({"request_id": self._id, "usage": said, "output_mode": mode, "choices": []}) + DONE

    def whole(self, results: Sequence[Result], usage: Usage, kv_transfer_params: Mapping[str, Any] | None) -> bytes:
        prompt = results[0].prompt
        return encode(
            {
                "request_id": self._id,
                "model": self._model,
                "created": self._created,
                "usage": usage.brief() | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}},
                "prompt_logprobs": self._prompt_logprobs(prompt) if self.ask.prompt_logprobs else None,
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": prompt.token_ids if self.prompt_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": kv_transfer_params,
                "ec_transfer_params": None,
                "output_mode": "text" if self.text else "tokens",
                "choices": [self._one(_of(at, result)) for at, result in enumerate(results)],
            }
        )

    def _one(self, piece: Piece) -> JSON:
        choice: JSON = {"index": piece.index, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        choice |= {"token_ids": list(piece.token_ids), "routed_experts": None, "sampling_mask": None}
        choice["weight_versions"] = None
        if self.text:
            choice["text"] = piece.text
        choice["logprobs"] = None
        if self.ask.logprobs is not None:
            choice["logprobs"] = {"content": [self._of_id(token_id) for token_id in piece.token_ids]}
        return choice

    def _of_id(self, token_id: int) -> JSON:
        if self.text:
            return self._scored(self._name(token_id))
        facts: JSON = {"token_id": token_id, "logprob": 0.0, "rank": 1}
        return facts | {"top_logprobs": [facts] if self.ask.logprobs else []}


def _of(index: int, result: Result) -> Piece:
    """A choice that is told at once."""
    return Piece(
        index=index,
        prompt=result.prompt,
        text=result.text,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )
