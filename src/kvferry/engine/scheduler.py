"""Continuous batching over paged blocks, by vLLM's rules: running requests first, then those that wait, chunked
prefill within a token budget, preemption of the youngest when the pool is empty, blocks of a finished or aborted
request kept while the connector still needs them.

One thread. The connector's scheduler half is called as vLLM calls it (see docs/journey.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvferry.engine.config import EngineConfig
from kvferry.engine.content import EOS, U64, next_token, prefix_terms
from kvferry.engine.pool import BlockPool
from kvferry.engine.request import Output, Request, Status

if TYPE_CHECKING:
    from kvferry.connector.scheduler_side import SchedulerSide
    from kvferry.engine.rank import Done


@dataclass(eq=False)
class Step:
    """One step as planned, with the names under which the connector reads it.

    `new_blocks`: request -> blocks it got in this step, its first ones too. `fresh`: requests whose table begins anew.
    """

    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    total_num_scheduled_tokens: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kv_connector_block_state(self) -> Step:
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int]] | None:
        table = self.tables.get(request_id)
        return None if table is None else (table,)

    def add(self, request: Request, tokens: int) -> None:
        self.scheduled.append((request, tokens))
        self.num_scheduled_tokens[request.request_id] = tokens
        self.tables[request.request_id] = request.block_ids
        self.total_num_scheduled_tokens += tokens


@dataclass
class Report:
    """What the ranks told in one step, under vLLM's names; the connector may take ids out of `finished_sending`."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclass(frozen=True)
class Counts:
    """Since the start. Prompt tokens by where their KV came from, under vLLM's names."""

    preemptions: int = 0
    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    generation: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Scheduler:
    def __init__(self, config: EngineConfig, connector: SchedulerSide | None) -> None:
        self.config, self.connector = config, connector
        self._recomputes = (config.kv_transfer or {}).get("kv_load_failure_policy") == "recompute"
        self.pool = BlockPool(config.num_blocks, config.fragmentation)
        self.counts = Counts()
        self._by_id: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._landing: dict[str, Request] = {}  # blocks allocated, KV comes from elsewhere
        self._landed: deque[Request] = deque()
        self._to_recompute: set[str] = set()  # landing, but in vain
        self._kept: dict[str, list[int]] = {}  # ended here, but somebody may still write to the blocks
        self._sending: dict[str, list[int]] = {}  # finished here, read by the transfer thread
        self._outputs: list[Output] = []
        self._ended: list[str] = []
        self._told_sent: Counter[str] = Counter()
        self._told_received: Counter[str] = Counter()

    # -- the engine loop's view -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._landing) + len(self._landed)

    def has_work(self) -> bool:
        """Steps are needed: for tokens, or so that the connector hears of what has ended."""
        return bool(self._by_id or self._kept or self._sending)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_ended(self) -> list[str]:
        """Requests that ended since the last call: ranks forget them."""
        ended, self._ended = self._ended, []
        return ended

    def add(self, request: Request) -> None:
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        request.hash_tokens()
        if self.connector is not None:
            self.connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        request = self._by_id.get(request_id)
        if request is not None:
            self._remove(request)
            self._finish(request, Status.FINISHED_ABORTED)

    # -- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        step = Step()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if not step.preempted_req_ids:
            self._schedule_waiting(step, budget)
        return step

    def _schedule_running(self, step: Step, budget: int) -> int:
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            tokens = min(len(request.token_ids) - request.num_computed_tokens, budget)
            while not self._grow(step, request, request.num_computed_tokens + tokens):
                victim = self._running.pop()
                self._preempt(step, victim)
                if victim is request:
                    return budget
            step.add(request, tokens)
            budget -= tokens
            index += 1
        return budget

    def _grow(self, step: Step, request: Request, tokens: int) -> bool:
        missing = -(-tokens // self.config.block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        taken = self.pool.take(missing)
        if taken is None:
            return False
        request.block_ids += taken
        step.new_blocks.setdefault(request.request_id, []).extend(taken)
        return True

    def _start_anew(self, request: Request) -> None:
        """Give its blocks back; it waits for others."""
        self.pool.give_back(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.status = Status.PREEMPTED
        self._waiting.appendleft(request)

    def _preempt(self, step: Step, request: Request) -> None:
        self._start_anew(request)
        request.hash_tokens()
        step.preempted_req_ids.add(request.request_id)
        step.new_blocks.pop(request.request_id, None)
        self.counts = replace(self.counts, preemptions=self.counts.preemptions + 1)

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        while budget > 0 and len(self._running) < self.config.max_num_seqs and (self._landed or self._waiting):
            if self._landed:
                request = self._landed[0]
                tokens = min(len(request.token_ids) - request.num_computed_tokens, budget)
                if not self._grow(step, request, request.num_computed_tokens + tokens):
                    return
                self._landed.popleft()
            else:
                request = self._waiting[0]
                external = self._admit(step, request, budget)
                if external is None:
                    return
                self._waiting.popleft()
                if external:
                    continue
                tokens = min(len(request.token_ids) - request.num_computed_tokens, budget)
            request.status = Status.RUNNING
            self._running.append(request)
            step.add(request, tokens)
            budget -= tokens

    def _admit(self, step: Step, request: Request, budget: int) -> int | None:
        """Blocks for a request that has none: how many of its tokens come from elsewhere; None: not now."""
        size, known = self.config.block_size, len(request.token_ids)
        found: list[int] = []
        if self.config.enable_prefix_caching:
            found = self.pool.find(request.prefix_at(end) for end in range(size - 1, known - 1, size))
        local = len(found) * size
        external = self.connector.matched_tokens(request, local)[0] if self.connector is not None else 0
        end = local + external if external else min(known, local + budget)
        self.pool.share(found)
        taken = self.pool.take(-(-end // size) - len(found))
        if taken is None:
            self.pool.give_back(found)
            return None
        first_time = request.status is Status.WAITING
        request.block_ids = found + taken
        request.num_computed_tokens = local + external
        step.new_blocks[request.request_id] = list(request.block_ids)
        step.fresh.add(request.request_id)
        if first_time:
            request.num_cached_tokens = local + external
            counts = self.counts
            self.counts = replace(
                counts,
                prefix_queries=counts.prefix_queries + (known if self.config.enable_prefix_caching else 0),
                prefix_hits=counts.prefix_hits + local,
                local_cache_hit=counts.local_cache_hit + local,
                external_kv_transfer=counts.external_kv_transfer + external,
                local_compute=counts.local_compute + known - local - external,
            )
        if self.connector is not None:
            self.connector.allocated(request, request.block_ids, external)
        if external:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self._landing[request.request_id] = request
        return external

    # -- after the step ---------------------------------------------------------------------------------------------

    def update(self, step: Step, totals: Mapping[str, int], report: Report) -> None:
        """`totals`: for requests whose last known token was computed, what all their KV sums to."""
        if self.connector is not None and (report.finished_sending or report.finished_recving):
            self.connector.update(report)
        self._tokens(step, totals)
        if self._recomputes:
            self._to_recompute |= report.failed_recving & self._landing.keys()
        for request_id in report.failed_recving - self._to_recompute:
            request = self._landing.pop(request_id, None)
            if request is not None:
                if request_id not in report.finished_recving:
                    self._kept[request_id] = request.block_ids
                    request.block_ids = []
                self._finish(request, Status.FINISHED_ERROR, "the KV did not come from the prefill engine")
        for request_id in report.finished_recving:
            self._received(request_id)
        for request_id in report.finished_sending:
            self.pool.give_back(self._sending.pop(request_id, []))

    def gather(self, answers: Sequence[Done]) -> Report:
        """What all ranks have told so far: sent and received when every rank has said so, failed with the first."""
        whole: list[set[str]] = []
        for name, told in (("sent", self._told_sent), ("received", self._told_received)):
            complete = set()
            for answer in answers:
                for request_id in getattr(answer, name):
                    told[request_id] += 1
                    if told[request_id] == self.config.tp:
                        del told[request_id]
                        complete.add(request_id)
            whole.append(complete)
        return Report(whole[0], whole[1], set().union(*(answer.failed for answer in answers)))

    def _received(self, request_id: str) -> None:
        self.pool.give_back(self._kept.pop(request_id, []))
        request = self._landing.pop(request_id, None)
        if request is not None and request_id in self._to_recompute:
            self._to_recompute.discard(request_id)
            self._start_anew(request)
        elif request is not None:
            request.status = Status.WAITING
            self._label(request, 0, request.num_computed_tokens)
            self._landed.append(request)

    def _tokens(self, step: Step, totals: Mapping[str, int]) -> None:
        made: list[tuple[Request, int]] = []
        for request, tokens in step.scheduled:
            before = request.num_computed_tokens
            request.num_computed_tokens = before + tokens
            self._label(request, before, before + tokens)
            if request.request_id in totals:
                position = len(request.token_ids)
                sampling = request.sampling
                may_end = not sampling.ignore_eos and request.num_output_tokens >= sampling.min_tokens
                total = totals[request.request_id]
                token = next_token(total, position, self.config.vocab_size, may_end)
                made.append((request, token))
        if not made:
            return
        for (request, token), value in zip(made, _next_prefixes(made), strict=True):
            request.append(token, value)
            self._emit(request, token)
        self.counts = replace(self.counts, generation=self.counts.generation + len(made))

    def _emit(self, request: Request, token: int) -> None:
        sampling, count = request.sampling, request.num_output_tokens
        if count >= sampling.min_tokens and (
            token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        ):
            self._running.remove(request)
            self._finish(request, Status.FINISHED_STOPPED, token=token)
        elif count >= sampling.max_tokens or len(request.token_ids) >= self.config.max_model_len:
            self._running.remove(request)
            self._finish(request, Status.FINISHED_LENGTH_CAPPED, token=token)
        else:
            self._outputs.append(Output(request.request_id, (token,), num_cached_tokens=request.num_cached_tokens))

    def _label(self, request: Request, before: int, after: int) -> None:
        """Full blocks can be found from now on."""
        size = self.config.block_size
        if not self.config.enable_prefix_caching or before // size == after // size:
            return
        for index in range(before // size, after // size):
            self.pool.label(request.block_ids[index], request.prefix_at((index + 1) * size - 1))

    # -- the end of a request ---------------------------------------------------------------------------------------

    def _remove(self, request: Request) -> None:
        """From whichever queue it is in."""
        if self._landing.pop(request.request_id, None) is not None:
            return
        for queue in (self._running, self._waiting, self._landed):
            if request in queue:
                queue.remove(request)
                return

    def _finish(self, request: Request, status: Status, error: str = "", token: int | None = None) -> None:
        landing = request.status is Status.WAITING_FOR_REMOTE_KVS
        request.status = status
        request_id = request.request_id
        del self._by_id[request_id]
        self._to_recompute.discard(request_id)
        self._ended.append(request_id)
        delay, params = False, None
        if self.connector is not None:
            blocks = request.block_ids[: -(-request.num_computed_tokens // self.config.block_size)]
            delay, params = self.connector.finished(request, blocks)
        if delay:
            self._sending[request_id] = request.block_ids
        elif landing and status is Status.FINISHED_ABORTED:
            self._kept[request_id] = request.block_ids
        else:
            self.pool.give_back(request.block_ids)
        request.block_ids = []
        reason = {
            Status.FINISHED_STOPPED: "stop",
            Status.FINISHED_LENGTH_CAPPED: "length",
            Status.FINISHED_ABORTED: "abort",
        }.get(status, "error")
        stopped_by = token if status is Status.FINISHED_STOPPED and token != EOS else None
        self._outputs.append(
            Output(
                request_id,
                () if token is None else (token,),
                reason,  # type: ignore[arg-type]
                stopped_by,
                request.num_cached_tokens,
                params,
                error,
            )
        )


def _next_prefixes(made: list[tuple[Request, int]]) -> list[int]:
    """`content.prefixes` one token on, for many requests at once."""
    tokens: U64 = np.array([token for _, token in made], dtype=np.uint64)
    positions = np.array([len(request.token_ids) for request, _ in made], dtype=np.uint64)
    before = np.array([request.prefix_at(len(request.token_ids) - 1) for request, _ in made], dtype=np.uint64)
    found: list[int] = (before + prefix_terms(tokens, positions)).tolist()
    return found
