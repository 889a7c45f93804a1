"""A request on D whose KV comes from elsewhere, and an engine that runs out of blocks, by vLLM's rules."""

from __future__ import annotations

from engine_loops import config

from kvferry.config import connector_config
from kvferry.connector.scheduler_side import SchedulerSide
from kvferry.engine.invariants import check_engine
from kvferry.engine.request import Request, Sampling, Status
from kvferry.engine.scheduler import Report, Scheduler, Step
from kvferry.story import Story

SIZE = 4
BLOCKS = 12
PARAMS = {"do_remote_prefill": True, "transfer_id": "t" * 32, "remote_host": "127.0.0.1", "remote_port": 5600}


class Engine:
    """D, whose ranks compute nothing."""

    def __init__(self) -> None:
        engine = config(num_blocks=BLOCKS, block_size=SIZE, max_model_len=BLOCKS * SIZE, enable_prefix_caching=False)
        self.side = SchedulerSide(connector_config({}, {}), "kv_consumer", "D", 1, SIZE, Story(None, "decode"))
        self.scheduler = Scheduler(engine, self.side)
        self.lands: list[object] = []

    def ask(self, name: str, tokens: int, **params: object) -> Request:
        request = Request(name, list(range(300, 300 + tokens)), Sampling(30, ignore_eos=True))
        request.kv_transfer_params = dict(params) or None
        self.scheduler.add(request)
        return request

    def step(self, received: set[str] | None = None) -> Step:
        step = self.scheduler.schedule()
        self.lands += self.side.build(step).lands
        totals = {
            request.request_id: 7
            for request, tokens in step.scheduled
            if request.num_computed_tokens + tokens == len(request.token_ids)
        }
        self.scheduler.update(step, totals, Report(set(), received or set(), set()))
        check_engine(self.scheduler)
        return step


def test_a_request_that_waits_for_its_kv_is_never_preempted() -> None:
    d = Engine()
    waits = d.ask("waits", 17, **PARAMS)
    others = [d.ask(f"other{number}", 9) for number in range(2)]
    d.step()
    blocks = list(waits.block_ids)
    assert waits.status is Status.WAITING_FOR_REMOTE_KVS and len(blocks) == 4
    preempted: set[str] = set()
    for _ in range(20):
        preempted |= d.step().preempted_req_ids
        assert waits.block_ids == blocks and waits.status is Status.WAITING_FOR_REMOTE_KVS
    assert preempted <= {one.request_id for one in others} and preempted, "the pool was never short"
    assert len(d.lands) == 1


def test_preempted_while_it_decodes_it_asks_for_nothing() -> None:
    """C49: it computes its prompt anew, here."""
    d = Engine()
    first = d.ask("first", 9)
    d.step()
    loaded = d.ask("loaded", 9, **PARAMS)
    d.step()
    d.step(received={"loaded"})
    assert len(d.lands) == 1 and loaded.status is not Status.WAITING_FOR_REMOTE_KVS
    preempted: set[str] = set()
    for _ in range(200):
        if not d.scheduler.has_work():
            break
        preempted |= d.step().preempted_req_ids
        assert loaded.status is not Status.WAITING_FOR_REMOTE_KVS
    assert "loaded" in preempted, "it was never preempted"
    assert len(d.lands) == 1, "it asked a second time"
    assert not d.scheduler.has_work() and d.scheduler.pool.num_free == BLOCKS
    assert first.num_output_tokens == loaded.num_output_tokens == 30
