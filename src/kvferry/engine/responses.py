"""`/v1/responses` without a store and without tools of the engine's own, in vLLM's shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.engine.openai import BadRequest, ChatCompletion
from kvferry.engine.replies import JSON, Piece, Prompt, Replies, Result, Usage, encode

STORELESS = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


_TOOL = dict.fromkeys(("allowed_callers", "async", "defer_loading", "output_schema", "strict"))


class Responses(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    background: bool | None = False
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False
    include: list[str] | None = None
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    truncation: str | None = "disabled"
    request_id: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def chat_of_responses(body: Responses) -> ChatCompletion:
    """The chat that it is but for its shape. Raises `BadRequest`."""
    if body.background:
        param = "background"
        if body.store is False:
            raise BadRequest("background can only be used when `store` is true", param=param, kind="Bad Request")
        raise BadRequest(STORELESS, param=param, kind="invalid_request_error")
    if body.previous_response_id is not None:
        raise BadRequest(
            f"Response with id '{body.previous_response_id}' not found.",
            param="response_id",
            status=404,
            kind="invalid_request_error",
        )
    messages: list[JSON] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [{"role": item.get("role"), "content": _parts(item.get("content"))} for item in body.input]
    logprobs = "message.output_text.logprobs" in (body.include or ())
    return ChatCompletion(
        messages=messages,
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        tools=[*body.tools] or None,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        request_id=body.request_id,
        priority=body.priority,
        kv_transfer_params=body.kv_transfer_params,
    )


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    kinds = {"input_text": "text", "output_text": "text"}
    return [part | {"type": kinds.get(part.get("type"), part.get("type"))} for part in content]


class ResponsesReplies(Replies):
    """`body`: the request, which a reply repeats; `limit`: of its output tokens."""

    body: Responses
    limit: int = 0
    _sequence = 0
    _result: Result | None = None
    _scores: list[JSON]

    def early(self) -> bytes:
        response = self._response("in_progress", [], None)
        self._scores = []
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opening(self, index: int, prompt: Prompt) -> bytes:
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return self._event(
            "response.output_item.added", output_index=0, item=self._item("in_progress", [])
        ) + self._event(
            "response.content_part.added", output_index=0, content_index=0, item_id=self._item_id, part=part
        )

    def plain(self, index: int, prompt: Prompt) -> tuple[bytes, bytes] | None:
        return None

    def delta(self, piece: Piece) -> tuple[bytes, int]:
        """The reasons and the text so far are kept for the last events."""
        before = self._result.text if self._result is not None else ""
        self._result = Result(
            prompt=piece.prompt,
            text=before + piece.text,
            token_ids=(),
            finish_reason=piece.finish_reason or "",
            stop_reason=piece.stop_reason,
        )
        scores = self._scores_of(piece.token_ids)
        self._scores += scores
        event = self._event(
            "response.output_text.delta",
            output_index=0,
            content_index=0,
            item_id=self._item_id,
            delta=piece.text,
            logprobs=[_brief(score) for score in scores],
        )
        return (event if piece.text else b""), piece.offset

    def closing(self, usage: Usage) -> bytes:
        result = self._result
        assert result is not None
        part = self._part(result.text, self._scores if self.ask.logprobs is not None else None)
        place: JSON = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        item = self._item("completed", [part])
        status = "incomplete" if result.finish_reason == "length" else "completed"
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=result.text, logprobs=[]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response.completed", response=self._response(status, [item], usage)),
            )
        )

    def whole(self, results: Sequence[Result], usage: Usage, kv_transfer_params: Mapping[str, Any] | None) -> bytes:
        (result,) = results
        scores = self._scores_of(result.token_ids) if self.ask.logprobs is not None else None
        item = self._item("completed", [self._part(result.text, scores)])
        status = "incomplete" if result.finish_reason == "length" else "completed"
        return encode(self._response(status, [item], usage) | {"kv_transfer_params": kv_transfer_params})

    # -- parts of both

    @property
    def _item_id(self) -> str:
        return f"msg_{self._id.removeprefix('resp_')}"

    def _event(self, kind: str, **facts: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._sequence} | facts)
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _scores_of(self, token_ids: Sequence[int]) -> list[JSON]:
        return [self._scored(self._name(token_id)) for token_id in token_ids] if self.ask.logprobs is not None else []

    def _item(self, status: str, content: list[JSON]) -> JSON:
        item: JSON = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return item | {"content": content, "phase": None}

    def _part(self, text: str, scores: list[JSON] | None) -> JSON:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": scores}

    def _response(self, status: str, output: list[JSON], usage: Usage | None) -> JSON:
        body = self.body
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice if body.tools else "none",
            "tools": [_TOOL | tool if tool.get("type") == "function" else tool for tool in body.tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": body.background,
            "max_output_tokens": self.limit,
            "previous_response_id": None,
            "service_tier": "auto",
            "status": status,
            "text": body.text,
            "top_logprobs": self.ask.logprobs,
            "truncation": body.truncation,
            "usage": None if usage is None else _usage(usage, self.block),
            "user": body.user,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "max_tool_calls": None,
            "prompt": None,
            "reasoning": None,
            "input_messages": None,
            "output_messages": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }


def _brief(score: JSON) -> JSON:
    """As an event has it: without bytes."""
    tops = [_brief(top) for top in score["top_logprobs"]] if "top_logprobs" in score else None
    kept = {key: value for key, value in score.items() if key not in ("bytes", "top_logprobs")}
    return kept if tops is None else kept | {"top_logprobs": tops}


def _usage(usage: Usage, block: int) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created(block),
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
