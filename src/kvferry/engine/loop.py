"""The engine loop: one thread that plans a step, has every rank do it, and hands out what came of it.

Threads: `add`, `abort`, `stats`, `inject`, `close` may be called from any; all else happens on the engine thread. A
deque carries requests and aborts to it; each append sets the event on which the loop sleeps when it has no work.
`deliver` is called on the engine thread, once per step, and so is `moved`, with what all ranks' transfers did, if they
did anything. The connector's own transfer thread lives in each rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.config import connector_config
from kvferry.engine.config import EngineConfig
from kvferry.engine.invariants import check_engine
from kvferry.engine.rank import Done, Work
from kvferry.engine.ranks import Ranks, combined, make_ranks
from kvferry.engine.request import Output, Request
from kvferry.engine.scheduler import Counts, Scheduler, Step
from kvferry.errors import EngineError
from kvferry.story import Story, story_side

if TYPE_CHECKING:
    from kvferry.connector.scheduler_side import SchedulerSide
    from kvferry.transfer.stats import TransferStats

Deliver = Callable[[list[Output]], None]
Moved = Callable[["TransferStats"], None]
_BLOCKED_S = 0.001  # nothing can run though there is work: vLLM looks again after as long


@dataclass(frozen=True)
class Stats:
    """`kv_usage`: 0 to 1. `late_s`: how much longer than modelled the steps took in all."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    late_s: float = 0.0
    counts: Counts = field(default_factory=Counts)


class EngineLoop:
    def __init__(self, config: EngineConfig, deliver: Deliver, moved: Moved | None = None) -> None:
        config.check()
        self.config = config
        self.death: BaseException | None = None
        self._deliver, self._moved = deliver, moved
        self._inbox: deque[Request | str | tuple[Mapping[str, Any], Future[None]]] = deque()
        self._news = threading.Event()
        self._stopping = False
        self._started: Future[None] = Future()
        self._stats = Stats()
        self._own_before = 0.0  # `_own_s` when the last step's ranks were done
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Memory, ranks and connector exist when this returns. Raises `KVFerryError`."""
        self._thread.start()
        self._started.result()

    def add(self, request: Request) -> None:
        self._post(request)

    def abort(self, request_id: str) -> None:
        """Its last output has the finish reason 'abort'. An unknown or ended id is ignored."""
        self._post(request_id)

    def inject(self, fault: Mapping[str, Any]) -> None:
        """Arm a fault in every rank. Raises `ConfigError`; waits for the end of the present step."""
        done: Future[None] = Future()
        self._post((fault, done))
        done.result(timeout=60.0)

    def stats(self) -> Stats:
        return self._stats

    def close(self) -> None:
        """Stop after the present step and let go of everything. Idempotent."""
        self._stopping = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)

    def _post(self, item: Request | str | tuple[Mapping[str, Any], Future[None]]) -> None:
        if self.death is not None:
            raise EngineError(f"the engine is dead: {self.death}")
        self._inbox.append(item)
        self._news.set()

    # -- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ranks: Ranks | None = None
        try:
            try:
                ranks = make_ranks(self.config)
                scheduler = Scheduler(self.config, self._connector())
            except BaseException as error:  # noqa: BLE001 - told to `start`, which raises it
                self._started.set_exception(error)
                return
            self._own_before = self._own_s(scheduler)
            self._started.set_result(None)
            while not self._stopping:
                self._take_news(scheduler, ranks)
                if scheduler.has_work():
                    self._step(scheduler, ranks)
                else:
                    self._count(scheduler, [])  # an abort may have emptied it, with no step to tell of that
                    self._hand_out(scheduler)
                    if self.config.debug_invariants:
                        check_engine(scheduler)
                    self._wait(scheduler)
        except BaseException as death:
            self.death = death
            raise
        finally:
            if ranks is not None:
                ranks.close()
            self._refuse_rest()

    def _connector(self) -> SchedulerSide | None:
        transfer = self.config.kv_transfer
        if transfer is None:
            return None
        from kvferry.connector.scheduler_side import SchedulerSide

        settings = connector_config(transfer.get("kv_connector_extra_config") or {})
        role = str(transfer["kv_role"])
        story = Story(settings.story_dir or None, story_side(role), 0)
        return SchedulerSide(settings, role, str(transfer["engine_id"]), self.config.tp, self.config.block_size, story)

    def _take_news(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self._news.clear()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                scheduler.add(item)
            elif isinstance(item, str):
                scheduler.abort(item)
            else:
                fault, done = item
                try:
                    ranks.inject(fault)
                    done.set_result(None)
                except Exception as error:  # noqa: BLE001 - told to the caller, who raises it
                    done.set_exception(error)
        self._hand_out(scheduler)

    def _step(self, scheduler: Scheduler, ranks: Ranks) -> None:
        step = scheduler.schedule()
        metadata = scheduler.connector.build(step) if scheduler.connector is not None else None
        work = self._work(scheduler, step)
        work.metadata = metadata
        work.spent_s = self._own_s(scheduler) - self._own_before
        answers = ranks.step(work)
        self._own_before = self._own_s(scheduler)
        totals = combined(answers, max(1, self.config.tp // self.config.profile.shape.kv_heads))
        scheduler.update(step, totals, scheduler.gather(answers))
        self._count(scheduler, answers)  # first, so that whoever has an answer finds it in the numbers
        self._tell_transfers(answers)
        self._hand_out(scheduler)
        if not step.scheduled and (metadata is None or not metadata.idle):
            self._wait(scheduler, _BLOCKED_S)

    def _wait(self, scheduler: Scheduler, timeout_s: float | None = None) -> None:
        self._news.wait(timeout_s)
        self._own_before = self._own_s(scheduler)

    def _own_s(self, scheduler: Scheduler) -> float:
        """A clock that stands still while the connector holds the engine: its work comes on top of the model's."""
        return time.perf_counter() - (scheduler.connector.hook_s if scheduler.connector is not None else 0.0)

    def _work(self, scheduler: Scheduler, step: Step) -> Work:
        work = Work(step.new_blocks, step.fresh, scheduler.take_ended())
        prompt: list[tuple[int, int]] = []
        context = 0
        for request, tokens in step.scheduled:
            start = request.num_computed_tokens
            wanted = start + tokens == len(request.token_ids)
            if tokens == 1 and wanted:
                work.decodes.append((request.request_id, start, request.prefix_at(start)))
            else:
                work.prompts.append((request.request_id, start, request.prefixes_of(start, start + tokens), wanted))
            if tokens == 1 and start >= request.num_prompt_tokens - 1:
                context += start
            else:
                prompt.append((tokens, start))
        decodes = len(step.scheduled) - len(prompt)
        work.model_s = self.config.profile.step_ms(prompt, decodes, context) / 1e3
        return work

    def _hand_out(self, scheduler: Scheduler) -> None:
        outputs = scheduler.take_outputs()
        if outputs:
            self._deliver(outputs)

    def _count(self, scheduler: Scheduler, answers: list[Done]) -> None:
        before = self._stats
        self._stats = Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=1 - scheduler.pool.num_free / scheduler.pool.num_blocks,
            steps=before.steps + bool(answers),
            late_s=before.late_s + max((answer.late_s for answer in answers), default=0.0),
            counts=scheduler.counts,
        )

    def _tell_transfers(self, answers: list[Done]) -> None:
        told = [answer.transfers for answer in answers if answer.transfers is not None]
        if told and self._moved is not None:
            for other in told[1:]:
                told[0].add(other)
            self._moved(told[0])

    def _refuse_rest(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, tuple):
                item[1].set_exception(EngineError("the engine ended"))
