"""vLLM's `EngineClient` without an engine: requests go to a session, and outputs come from there.

Everything that vLLM's frontend does to a request before its engine core, and to an output after it, is done by vLLM's
own input and output processors. Importing this loads vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from copy import copy
from itertools import count
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from kvferry.render import compat
from kvferry.render.leg import Item, Leg
from kvferry.render.logprobs import Row, prompt_rows, sample_row
from kvferry.render.requests import generate_body, sampling_body
from kvferry.render.session import CURRENT
from kvferry.render.wire import Chunk, LogProbs, Refused

TASKS = ("generate",)


class RemoteEngine(EngineClient):  # type: ignore[misc]
    """`served`: the name that engines know the model by. Loop thread only."""

    def __init__(self, vllm_config: Any, served: str) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = compat.renderer_of(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._served = served
        self._numbers = count()

    is_running = True
    is_stopped = False
    errored = False
    dead_error = RuntimeError("a render worker has no engine that could die")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        """A worker that answers is healthy."""

    async def do_log_stats(self) -> None:
        """There is nothing to tell."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def add_lora(self, lora_request: Any) -> bool:
        """Adapters are loaded where the weights are."""
        return True

    async def notify_kv_transfer_request_rejected(self, *args: Any, **options: Any) -> None:
        """The router hears of it by the opening's reply."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self.output_processor.abort_requests(names, internal=False)

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Not a generator function itself: the session must know of all prompts before the first is iterated."""
        session = CURRENT.get(None)
        if session is None:
            raise compat.validation_error("a render worker generates nothing: ask the router")
        try:
            leg = session.ask()
        except Refused as refused:
            raise compat.validation_error(str(refused)) from None
        return self._outputs(leg, prompt, sampling_params, request_id, **options)

    async def _outputs(
        self, leg: Leg, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        session = CURRENT.get()
        failed = True
        admitted: Admitted | None = None
        try:
            admitted = await self._admit(leg, prompt, sampling_params, request_id, **options)
            session.admitted(leg, admitted.take_body(), admitted.process)
            async for output in leg.outputs():
                if output.finished:
                    failed = False
                    admitted = None
                yield output
                if output.finished:
                    return
        finally:
            if admitted is not None:
                self.output_processor.abort_requests([admitted.name], internal=True)
            session.left(leg, failed=failed)

    def _stop_token(self, request: Any) -> int | None:
        """The end of an answer, where an engine takes it as a stop token: those must be tokens of the model."""
        eos = compat.eos_of(request)
        return eos if eos is not None and eos < self.model_config.get_vocab_size() else None

    async def _admit(
        self,
        leg: Leg,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **engines: Any,
    ) -> Admitted:
        """Raises what vLLM raises for a request that it refuses. `engines`: concerns an engine alone."""
        rendered = isinstance(prompt, dict) and "type" in prompt
        options = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs, "priority": priority}
        inputs = self.input_processor
        if rendered:
            request = inputs.process_inputs(request_id, prompt, sampling_params, supported_tasks=TASKS, **options)
        else:
            process = inputs.process_inputs_async
            request = await process(request_id, prompt, sampling_params, supported_tasks=TASKS, **options)
        prompt_text, *_ = compat.extract_prompt_components(self.model_config, prompt)
        if request.prompt_token_ids is None:
            raise compat.validation_error("prompt_embeds: not served through the render tier")
        body = generate_body(
            request_id,
            request.prompt_token_ids,
            sampling_body(sampling_params, self.model_config.max_logprobs, self._stop_token(request)),
            model=lora_request.lora_name if lora_request is not None else self._served,
            priority=priority,
            others={
                "cache_salt": request.cache_salt,
                "features": compat.multimodal_features(prompt) if rendered else None,
                "reasoning_ended": reasoning_ended,
                "reasoning_parser_kwargs": reasoning_parser_kwargs,
            },
        )
        # Clients may use one id twice at once; the visible one stays theirs.
        request.external_req_id = request_id
        request.request_id = f"{next(self._numbers)}"
        return Admitted(self.output_processor, leg, request, prompt_text, body)


class Admitted:
    """One request; with its first token in vLLM's output processor, fanned out if it has several choices.

    Not before: what a detokenizer reads of a long prompt is read while the engines compute it.
    """

    def __init__(self, outputs: Any, leg: Leg, request: Any, prompt_text: str | None, body: bytes) -> None:
        self._body = body
        self.name: str = request.request_id
        self._request: Any = request
        self._prompt_text = prompt_text
        self._children: list[str] = []
        self._outputs = outputs
        self._leg = leg
        self._params = request.sampling_params
        self._eos = compat.eos_of(request)
        self._prompt: Chunk | None = None
        self._untold = set(range(self._params.n))
        self._reasons = compat.finish_reasons()

    def take_body(self) -> bytes:
        """For an engine; not kept here."""
        body, self._body = self._body, b""
        return body

    def _begin(self) -> None:
        outputs, request, prompt_text = self._outputs, self._request, self._prompt_text
        self._request = self._prompt_text = None
        if self._params.n == 1:
            outputs.add_request(request, prompt_text, None, 0, self._leg)
            self._children.append(self.name)
            return
        parent = ParentRequest(request)
        for index in range(self._params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            outputs.add_request(child, prompt_text, parent, index, self._leg)
            self._children.append(child.request_id)

    def process(self, item: Item) -> list[int]:
        """What an engine core's output would come to is put into the leg. Returns the choices that a stop string of
        the session's ended.
        """
        chunk, choice = item.chunk, item.choice
        if not self._children:
            self._begin()
        if choice is None:
            message = (chunk.error or {}).get("message")
            self._leg.put(compat.generation_error(message if isinstance(message, str) else "Internal server error"))
            return []
        if self._untold and (chunk.prompt_logprobs is not None or chunk.num_cached_tokens is not None):
            self._prompt = chunk
        if not 0 <= choice.index < len(self._children):
            return []
        if choice.finish_reason is not None and choice.finish_reason not in self._reasons:
            self._leg.put(compat.generation_error(f"finish_reason: unknown {choice.finish_reason!r}"))
            return []
        given: dict[str, Any] = {}
        if choice.logprobs is not None and choice.logprobs.content and self._params.logprobs is not None:
            given["new_logprobs"] = self._sampled(choice.logprobs)
        told = self._prompt if choice.index in self._untold else None
        self._untold.discard(choice.index)
        if not self._untold:
            self._prompt = None
        if told is not None and told.prompt_logprobs and self._params.prompt_logprobs is not None:
            rows = prompt_rows(told.prompt_logprobs)
            if rows:  # of a prompt of one token there is nothing to say
                given["new_prompt_logprobs_tensors"] = _prompt_tensors(rows)
        output = compat.core_output(
            self._children[choice.index],
            list(choice.token_ids or ()),
            told.num_cached_tokens if told is not None else None,
            told.num_cache_creation_tokens if told is not None else None,
            finish_reason=self._reasons[choice.finish_reason] if choice.finish_reason is not None else None,
            # sent as a stop token, it would be told as one
            stop_reason=choice.stop_reason if choice.stop_reason != self._eos else None,
            **given,
        )
        aborted = self._outputs.process_outputs([output]).reqs_to_abort
        return [choice.index] if aborted else []

    def _sampled(self, logprobs: LogProbs) -> Any:
        from vllm.v1.outputs import LogprobsLists

        rows = [sample_row(position, self._params.logprobs) for position in logprobs.content or ()]
        return LogprobsLists(
            [np.array(row.ids) for row in rows],
            [np.array(row.logprobs) for row in rows],
            np.array([row.rank for row in rows]),
        )


def _prompt_tensors(rows: Sequence[Row]) -> Any:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    return LogprobsTensors(
        torch.tensor([row.ids for row in rows]),
        torch.tensor([row.logprobs for row in rows], dtype=torch.float64),
        torch.tensor([row.rank for row in rows]),
    )
