"""Load on one OpenAI-compatible server: streamed completions of token-id prompts, timed event by event.

One event loop. Requests either follow each other, or leave at absolute times whatever the server does (open loop), so
that a slow answer delays no later request. Times are of `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from kvferry.bench.records import Sample
from kvferry.launch.cancel import Cancel

T = TypeVar("T")
TRANSFER_ID = "x-kvferry-transfer-id"
LEAD_S = 0.05
"""Before the first request, so that its body is ready in time."""
ENCODE_S = 0.2
"""A body is made so long before it is due: 16,000 tokens take a few milliseconds."""


class Pacer:
    """Sets each event at its time (ascending, of `time.perf_counter`), from a thread: the event loop's own timers have
    a resolution of a millisecond. Made on the event loop, which owns the events.
    """

    def __init__(self, times: Sequence[float], turns: Sequence[asyncio.Event]) -> None:
        self._times, self._turns = times, turns
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pacer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for at, turn in zip(self._times, self._turns, strict=True):
            if self._stopped.wait(max(0.0, at - time.perf_counter())):
                return
            self._loop.call_soon_threadsafe(turn.set)

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._stopped.set()
        self._thread.join()


class LoadClient:
    """`async with`. `max_in_flight` bounds open requests; what waits for its turn counts as late, not as unsent.
    `headers`: index of a request -> what is sent beside its body."""

    def __init__(
        self,
        url: str,
        model: str,
        output_tokens: int,
        *,
        timeout_s: float = 120.0,
        max_in_flight: int = 64,
        headers: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._headers = headers or {}
        self._url, self._model, self._output_tokens = url, model, output_tokens
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._turns = asyncio.Semaphore(max_in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def one_by_one(
        self, prompts: Sequence[tuple[int, list[int]]], done: Callable[[Sample], None] = lambda sample: None
    ) -> list[Sample]:
        """`prompts`: (index, token ids). Stops at the first failure: the rest would be measured on a sick server."""
        samples: list[Sample] = []
        for index, tokens in prompts:
            samples.append(await self.ask(index, tokens))
            done(samples[-1])
            if samples[-1].error:
                break
        return samples

    async def at_times(
        self,
        prompts: Sequence[tuple[int, list[int]]],
        due: Sequence[float],
        done: Callable[[Sample], None] = lambda sample: None,
    ) -> list[Sample]:
        """Prompt i leaves `due[i]` seconds after now; `due` ascends."""
        begun = time.perf_counter() + LEAD_S

        async def send(index: int, tokens: list[int], at: float, turn: asyncio.Event) -> Sample:
            await asyncio.sleep(at - ENCODE_S - time.perf_counter())
            body = self._encoded(tokens)
            await turn.wait()
            async with self._turns:
                sample = await self._ask(index, len(tokens), body, at)
            done(sample)
            return sample

        turns = [asyncio.Event() for _ in due]
        tasks = [
            asyncio.create_task(send(index, tokens, begun + offset, turn))
            for (index, tokens), offset, turn in zip(prompts, due, turns, strict=True)
        ]
        pacer = Pacer([begun + offset for offset in due], turns)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            pacer.stop()
            for task in tasks:
                task.cancel()

    async def ask(self, index: int, tokens: list[int]) -> Sample:
        """One request, now. A failure is told in `error`, never raised."""
        return await self._ask(index, len(tokens), self._encoded(tokens), None)

    def _encoded(self, tokens: list[int]) -> bytes:
        return json.dumps(self._body(tokens), separators=(",", ":")).encode()

    async def _ask(self, index: int, input_len: int, body: bytes, due: float | None) -> Sample:
        assert self._session is not None
        sample = Sample(index, input_len)
        sent = time.perf_counter()
        due = sent if due is None else due
        sample.sent_s = sent
        sample.lag_ms = (sent - due) * 1e3
        try:
            url = f"{self._url}/v1/completions"
            headers = {"Content-Type": "application/json", **self._headers.get(index, {})}
            async with self._session.post(url, data=body, headers=headers) as response:
                sample.transfer_id = response.headers.get(TRANSFER_ID, "")
                if response.status != 200:
                    sample.error = f"{response.status}: {(await response.text())[:300].strip()}"
                else:
                    await _read(response, sample, due)
        except aiohttp.ConnectionTimeoutError as error:
            sample.error = f"no connection: {error}"
        except TimeoutError:
            sample.error = f"no whole answer within {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        return sample

    def _body(self, tokens: list[int]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": self._output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            # How many tokens each event carries; without it several tokens in one event would look like one.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


async def _read(response: aiohttp.ClientResponse, sample: Sample, due: float) -> None:
    """The stream of one answer. An event counts by the time its last byte was read."""
    before = 0.0
    ended = False
    rest = b""
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                sample.error = f"error event: {str(event['error'])[:300]}"
                return
            try:
                usage = event.get("usage") or {}
                sample.prompt_tokens = usage.get("prompt_tokens", sample.prompt_tokens)
                total = _tokens_so_far(event, sample.tokens)
                text = event["choices"][0].get("text") or "" if total > sample.tokens else ""
            except (AttributeError, LookupError, TypeError):
                sample.error = f"an event that is no completion: {data[:200].decode(errors='replace')}"
                return
            if total <= sample.tokens:
                continue
            if not sample.tokens:
                sample.ttft_ms = (now - due) * 1e3
                sample.first_tokens = total
            else:
                sample.itl_ms.append((now - before) * 1e3)
            sample.tokens = total
            sample.text += text
            before = now
            sample.e2e_ms = (now - due) * 1e3
    if not ended:
        sample.error = "the stream ended without [DONE]"


def _tokens_so_far(event: dict[str, Any], before: int) -> int:
    """By the event's own count; a server that counts nothing sends one token per event."""
    if not event.get("choices"):
        return before
    usage = event.get("usage")
    return int(usage["completion_tokens"]) if usage else before + 1


def until_stopped(work: Coroutine[Any, Any, T], cancel: Cancel) -> T:
    """The result of `work` on an event loop of its own. Raises `Stopped` within moments of a request to stop."""

    async def watch() -> T:
        task = asyncio.create_task(work)
        while not (await asyncio.wait({task}, timeout=0.2))[0]:
            if cancel.count:
                task.cancel()
                await asyncio.wait({task})
                cancel.check()
        return task.result()

    return asyncio.run(watch())
