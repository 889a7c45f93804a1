"""Replies and stream events, in vLLM's shapes. Pure: results in, bytes out.

Fields that vLLM leaves out of a stream are left out, fields that it sends as null are null. The engine samples nothing,
so each token had probability 1 and its log is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.engine.openai import CHAT, Ask
from kvferry.engine.text import Tokenizer

JSON = dict[str, Any]
DONE = b"data: [DONE]\n\n"
FINGERPRINT = "kvferry"
_MARK = "\x00text\x00"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`text`: as the client sent it, or as the template made it; None where that was token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one event of a stream tells of one choice. `first`: it is the choice's first one. `made`: output tokens so
    far. `offset`: of the text, where the logprobs begin. The reasons are there at the end."""

    index: int
    prompt: Prompt
    text: str
    token_ids: Sequence[int]
    first: bool = False
    made: int = 0
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One choice, at its end."""

    prompt: Prompt
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def created(self, block: int) -> int | None:
        """Prompt tokens that came into the prefix cache, in whole blocks of so many tokens; 0: nothing is cached."""
        return max(0, self.prompt_tokens // block * block - self.cached_tokens) if block else 0

    def brief(self) -> JSON:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": total,
            "completion_tokens": self.completion_tokens,
        }


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def event(facts: JSON | bytes) -> bytes:
    return b"data: " + (facts if isinstance(facts, bytes) else encode(facts)) + b"\n\n"


class Replies:
    """What one request is answered with. `echoed`: a chat's last message, which the answer continues. `block`: see
    `Usage.created`."""

    block = 0

    def __init__(
        self,
        ask: Ask,
        tokenizer: Tokenizer,
        *,
        reply_id: str,
        model: str,
        created: int,
        role: str = "",
        echoed: str = "",
    ) -> None:
        self.ask = ask
        self._tokenizer = tokenizer
        self._id = reply_id
        self._model = model
        self._created = created
        self._role = role
        self._echoed = echoed
        self._chat = ask.route == CHAT

    # -- a stream

    def early(self) -> bytes:
        """The events that go out before there is any token."""
        return b""

    def opening(self, index: int, prompt: Prompt) -> bytes:
        """The events before a choice's first token: of a chat, its role."""
        if not self._chat:
            return b""
        facts = self._chunk(
            {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None},
            Usage(prompt_tokens=len(prompt.token_ids), completion_tokens=0, cached_tokens=0),
        )
        facts["prompt_token_ids"] = prompt.token_ids if self.ask.token_ids else None
        facts["prompt_text"] = prompt.text if self.ask.prompt_text else None
        if not self._echoed:
            return event(facts)
        echo = {"index": index, "delta": {"content": self._echoed}, "logprobs": None, "finish_reason": None}
        return event(facts) + event(self._chunk(echo, None))

    def delta(self, piece: Piece) -> tuple[bytes, int]:
        """One event, and the text offset that the next one's logprobs start at."""
        prompt, text, shown = piece.prompt, piece.text, piece.token_ids
        prompt_ids = prompt.token_ids if piece.first and (self.ask.token_ids or self.ask.echo) else None
        if piece.first and self.ask.echo and not self._chat:
            text = self._prompt_text(prompt) + ("" if self.ask.only_prompt else text)
            shown = [*prompt.token_ids, *(() if self.ask.only_prompt else shown)]
        logprobs, offset = self._logprobs(shown, piece.offset, unscored=len(shown) > len(piece.token_ids))
        ids = list(piece.token_ids) if self.ask.token_ids else None
        choice: JSON = {"index": piece.index}
        choice |= {"delta": {"content": text}} if self._chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        if not self._chat or piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if not self._chat:
            choice["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
        usage = Usage(prompt_tokens=len(prompt.token_ids), completion_tokens=piece.made, cached_tokens=0)
        facts = self._chunk(choice, usage)
        if self._chat and "usage" in facts:
            facts["usage"]["completion_tokens_details"] = None
        if piece.finish_reason is not None and not self.ask.usage:  # else the counts come last
            facts["system_fingerprint"] = FINGERPRINT
        return event(facts), offset

    def plain(self, index: int, prompt: Prompt) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of an event in mid-stream; None where more than the text changes."""
        if self.ask.token_ids or self.ask.continuous_usage or self.ask.logprobs is not None:
            return None
        marked = Piece(index=index, prompt=prompt, text=_MARK, token_ids=())
        head, tail = self.delta(marked)[0].split(encode(_MARK))
        return head, tail

    def closing(self, usage: Usage) -> bytes:
        """The events after the last token."""
        if not self.ask.usage:
            return DONE
        facts = self._chunk(None, None)
        details: JSON = {"cached_tokens": usage.cached_tokens}
        if self._chat:
            details["created_cache_tokens"] = usage.created(self.block)
        facts["usage"] = usage.brief() | {"prompt_tokens_details": details}
        facts["system_fingerprint"] = FINGERPRINT
        return event(facts) + DONE

    def _chunk(self, choice: JSON | None, usage: Usage | None) -> JSON:
        facts: JSON = {
            "id": self._id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice] if choice else [],
        }
        if self.ask.continuous_usage and usage is not None:
            facts["usage"] = usage.brief()
        return facts

    # -- a whole reply

    def whole(self, results: Sequence[Result], usage: Usage, kv_transfer_params: Mapping[str, Any] | None) -> bytes:
        first = results[0].prompt
        facts: JSON = {
            "id": self._id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage.brief()
            | {
                "prompt_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "created_cache_tokens": usage.created(self.block) if self._chat else None,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            },
        }
        if self._chat:
            facts["prompt_logprobs"] = self._prompt_logprobs(first) if self.ask.prompt_logprobs else None
            facts["prompt_token_ids"] = first.token_ids if self.ask.token_ids else None
            facts["prompt_text"] = first.text if self.ask.prompt_text else None
        facts["kv_transfer_params"] = kv_transfer_params
        facts["ec_transfer_params"] = None
        facts["metrics"] = None
        return encode(facts)

    def _choice(self, index: int, result: Result) -> JSON:
        ask, prompt = self.ask, result.prompt
        text, shown = result.text, result.token_ids
        if ask.echo and not self._chat:
            text = self._prompt_text(prompt) + ("" if ask.only_prompt else text)
            shown = [*prompt.token_ids, *(() if ask.only_prompt else shown)]
        logprobs, _ = self._logprobs(shown, 0, unscored=len(shown) > len(result.token_ids))
        choice: JSON = {"index": index}
        if self._chat:
            message = {"role": self._role, "content": self._echoed + text, "refusal": None, "annotations": None}
            choice["message"] = message | {"audio": None, "function_call": None, "reasoning": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        choice["token_ids"] = list(result.token_ids) if ask.token_ids else None
        if not self._chat:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt) if ask.prompt_logprobs else None
            choice["prompt_token_ids"] = prompt.token_ids if ask.token_ids else None
        choice["routed_experts"] = None
        return choice

    # -- parts of both

    def _prompt_text(self, prompt: Prompt) -> str:
        """As `echo` shows it; vLLM shows none beside token ids."""
        if self.ask.token_ids:
            return ""
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.ask.names_as_ids else self._tokenizer.token_text(token_id)

    def _logprobs(self, token_ids: Sequence[int], offset: int, *, unscored: bool) -> tuple[JSON | None, int]:
        """`unscored`: the first token is a prompt's first, of which nothing can be said."""
        if self.ask.logprobs is None:
            return None, offset
        names = [self._name(token_id) for token_id in token_ids]
        if self._chat:
            return {"content": [self._scored(name) for name in names]}, offset
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        scores: list[float | None] = [0.0] * len(names)
        tops: list[JSON | None] = [{name: 0.0} for name in names]
        if unscored:
            scores[0] = tops[0] = None
        return {"text_offset": offsets, "token_logprobs": scores, "tokens": names, "top_logprobs": tops}, offset

    def _scored(self, name: str) -> JSON:
        facts: JSON = {"token": name, "logprob": 0.0, "bytes": list(name.encode())}
        return facts | {"top_logprobs": [facts] if self.ask.logprobs else []}

    def _prompt_logprobs(self, prompt: Prompt) -> list[JSON | None]:
        def scored(token_id: int) -> JSON:
            text = self._tokenizer.token_text(token_id)
            return {str(token_id): {"logprob": 0.0, "rank": 1, "decoded_token": text}}

        return [None, *(scored(token_id) for token_id in prompt.token_ids[1:])]
