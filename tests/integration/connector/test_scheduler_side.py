"""The scheduler half under vLLM's calls: what the workers are told, and when the engine may free blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: run `make setup`")

from kvferry.config import connector_config
from kvferry.connector.metadata import StepMetadata
from kvferry.connector.scheduler_side import SchedulerSide
from kvferry.errors import InvariantBroken
from kvferry.ids import TransferId
from kvferry.protocol.prompt import prompt_digest
from kvferry.story import Story

BLOCK = 16
WHERE = {"remote_host": "127.0.0.1", "remote_port": 5600}


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 40
    max_tokens: int = 1
    num_computed_tokens: int = 0
    status: str = "FINISHED_LENGTH_CAPPED"
    prompt_token_ids: list[int] | None = None


@dataclass
class Blocks:
    table: dict[str, list[int]]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        return (self.table[request_id],) if request_id in self.table else None


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    table: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def kv_connector_block_state(self) -> Blocks:
        return Blocks(self.table)


@dataclass
class Output:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)


def side(role: str) -> SchedulerSide:
    return SchedulerSide(connector_config({"debug_invariants": True}, {}), role, "engine", 1, BLOCK, Story(None, "x"))


def source(request_id: str = "r", **more: Any) -> Request:
    return Request(request_id, {"do_remote_decode": True, "transfer_id": f"t-{request_id}"}, **more)


def landing(request_id: str = "r", **more: Any) -> Request:
    params = {"do_remote_prefill": True, "transfer_id": f"t-{request_id}", **WHERE}
    return Request(request_id, params, max_tokens=8, **more)


def step(one: SchedulerSide, tokens: dict[str, int] | None = None, **more: Any) -> StepMetadata:
    table = {name: list(range(10, 20)) for name in tokens or {}}
    return one.build(Scheduled(tokens or {}, table, **more))


class TestPrefill:
    def test_handed_over_in_the_step_that_computes_the_last_token(self) -> None:
        p, request = side("kv_producer"), source()
        p.on_new_request(request)
        first = step(p, {"r": 32})
        assert [e.transfer_id for e in first.expects] == ["t-r"] and not first.readies
        request.num_computed_tokens = 32
        (ready,) = step(p, {"r": 8}).readies
        assert (ready.request, ready.block_ids, ready.num_tokens) == ("r", (10, 11, 12), 40)
        assert not step(p, {"other": 3}).readies, "handed over once"
        request.num_computed_tokens = 40
        keep, reply = p.finished(request, [10, 11, 12])
        assert keep and reply is not None and reply["transfer_id"] == "t-r" and reply["do_remote_prefill"]
        assert step(p).idle
        output = Output(finished_sending={"r"})
        p.update(output)
        assert output.finished_sending == {"r"}, "the engine may free them now"
        assert not step(p).idle

    def test_a_request_that_runs_on_is_handed_over_when_it_ends(self) -> None:
        p, request = side("kv_producer"), source(max_tokens=5)
        p.on_new_request(request)
        assert not step(p, {"r": 40}).readies
        request.num_computed_tokens = 44
        keep, _ = p.finished(request, [7, 8, 9])
        assert keep and [r.block_ids for r in step(p).finished] == [(7, 8, 9)]

    def test_workers_that_are_done_before_the_engine_free_nothing_early(self) -> None:
        p, request = side("kv_producer"), source()
        p.on_new_request(request)
        step(p, {"r": 40})
        output = Output(finished_sending={"r"})
        p.update(output)
        assert output.finished_sending == set(), "the request still runs"
        request.num_computed_tokens = 40
        keep, reply = p.finished(request, [10, 11, 12])
        assert not keep and reply is not None

    def test_aborted_before_its_prompt_was_computed(self) -> None:
        p, request = side("kv_producer"), source()
        p.on_new_request(request)
        step(p, {"r": 16})
        request.num_computed_tokens, request.status = 16, "FINISHED_ABORTED"
        assert p.finished(request, [10]) == (False, None)
        (abort,) = step(p).aborts
        assert abort.transfer_id == "t-r" and "FINISHED_ABORTED" in abort.reason

    def test_preempted_after_hand_over_is_fenced_before_the_forward(self) -> None:
        p, request = side("kv_producer"), source()
        p.on_new_request(request)
        step(p, {"r": 40})
        (fence,) = step(p, preempted_req_ids={"r"}).fences
        assert (fence.request, fence.transfer_id) == ("r", "t-r")

    def test_news_of_strangers_never_reaches_the_engine(self) -> None:
        """vLLM asserts that it knows every id it is told to free."""
        p = side("kv_producer")
        output = Output(finished_sending={"never-seen"})
        p.update(output)
        assert output.finished_sending == set()

    def test_a_transfer_id_in_use_is_not_taken_twice(self) -> None:
        """C35."""
        p = side("kv_producer")
        p.on_new_request(source("a"))
        again = source("b")
        again.kv_transfer_params = {"do_remote_decode": True, "transfer_id": "t-a"}
        p.on_new_request(again)
        assert [e.request for e in step(p, {"a": 4}).expects] == ["a"]
        assert p.finished(again, [1]) == (False, None)

    def test_plain_requests_are_left_alone(self) -> None:
        p, request = side("kv_producer"), Request("plain", None)
        p.on_new_request(request)
        assert p.matched_tokens(request, 0) == (0, False)
        assert p.finished(request, [1, 2]) == (False, None)
        assert not step(p).news and not step(p).idle


class TestDecode:
    @pytest.mark.parametrize(
        ("prompt", "cached", "external", "blocks"),
        [
            (40, 0, 39, (0, 1, 2)),
            (33, 0, 32, (0, 1)),
            (40, 16, 23, (1, 2)),
            (49, 32, 16, (2,)),
            (1, 0, 0, ()),
            (17, 16, 0, ()),
        ],
    )
    def test_all_tokens_but_the_last(self, prompt: int, cached: int, external: int, blocks: tuple[int, ...]) -> None:
        """C45, C46, C47: what is asked for, and into which blocks it goes."""
        d, request = side("kv_consumer"), landing(num_prompt_tokens=prompt)
        d.on_new_request(request)
        assert d.matched_tokens(request, cached) == ((external, True) if external else (0, False))
        assert d.matched_tokens(request, cached)[0] == external, "no side effect"
        d.allocated(request, list(range(100, 110)), external)
        (land,) = step(d).lands
        assert land.block_ids == tuple(100 + b for b in blocks)
        assert land.end_token == prompt - 1 and land.end_token - land.start_token == external
        assert d.matched_tokens(request, cached) == (0, False), "never asked for twice: C49"

    def test_the_engines_word_counts(self) -> None:
        """vLLM may load nothing after all (prompt_logprobs): P is told, nothing is waited for."""
        d, request = side("kv_consumer"), landing()
        d.on_new_request(request)
        d.matched_tokens(request, 0)
        d.allocated(request, [1, 2, 3], 0)
        (land,) = step(d).lands
        assert land.start_token == land.end_token and land.block_ids == ()
        assert not step(d).idle

    def test_waits_idle_until_received(self) -> None:
        d, request = side("kv_consumer"), landing()
        d.on_new_request(request)
        d.allocated(request, [1, 2, 3], 39)
        assert step(d).news and step(d).idle
        d.update(Output(finished_recving={"r"}))
        assert not step(d).idle
        request.num_computed_tokens = 45
        assert d.finished(request, [1, 2, 3]) == (False, None)
        assert not step(d).news, "nothing more to tell"

    def test_p_hears_of_a_request_that_queues_for_blocks(self) -> None:
        """C53: once, and not of one that gets its blocks at once."""
        d, quick, slow = side("kv_consumer"), landing("quick"), landing("slow")
        d.on_new_request(quick)
        d.on_new_request(slow)
        d.allocated(quick, [1, 2, 3], 39)
        first = step(d)
        assert [wait.transfer_id for wait in first.waits] == ["t-slow"] and [x.request for x in first.lands] == [
            "quick"
        ]
        assert not step(d).waits
        d.allocated(slow, [4, 5, 6], 39)
        assert [x.request for x in step(d).lands] == ["slow"]

    def test_aborted_in_the_queue(self) -> None:
        """C33: it never had blocks; P is told all the same."""
        d, request = side("kv_consumer"), landing()
        d.on_new_request(request)
        assert d.finished(request, []) == (False, None)
        (land,) = step(d).lands
        assert land.start_token == land.end_token and land.block_ids == ()

    def test_aborted_while_it_waits(self) -> None:
        d, request = side("kv_consumer"), landing()
        d.on_new_request(request)
        d.allocated(request, [1, 2, 3], 39)
        step(d)
        assert d.finished(request, [1, 2, 3]) == (False, None)
        assert [drop.request for drop in step(d).drops] == ["r"]
        assert step(d).idle, "the engine holds its blocks and has nothing to do but wait"
        d.update(Output(finished_recving={"r"}))
        assert not step(d).idle

    @pytest.mark.parametrize("missing", ["transfer_id", "remote_host", "remote_port"])
    def test_bad_parameters_fail_the_request_and_not_the_engine(self, missing: str) -> None:
        """C68, where no middleware stands before the engine."""
        d, request = side("kv_consumer"), landing()
        assert request.kv_transfer_params is not None
        del request.kv_transfer_params[missing]
        d.on_new_request(request)
        assert d.matched_tokens(request, 0) == (39, True)
        d.allocated(request, [1, 2, 3], 39)
        (reject,) = step(d).rejects
        assert reject.request == "r" and missing in reject.reason
        d.finished(request, [1, 2, 3])

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    def test_wrong_role(self, role: str) -> None:
        one = side(role)
        request = landing() if role == "kv_producer" else source()
        one.on_new_request(request)
        if role == "kv_producer":
            one.allocated(request, [1, 2, 3], 39)
            assert "takes no KV" in step(one).rejects[0].reason
        else:
            assert not step(one, {"r": 40}).readies


@pytest.mark.parametrize("computed", [1, 15, 16, 17, 40])
def test_decode_goes_on_from_prefills_token(computed: int) -> None:
    """D has P's prompt and the token that P made: it takes the KV of all that P computed, and P knows it as its own."""
    ids = [100 + at for at in range(computed)]
    p, d = side("kv_producer"), side("kv_consumer")
    asked = landing(num_prompt_tokens=computed + 1, prompt_token_ids=[*ids, 7])
    p.on_new_request(source(num_prompt_tokens=computed, prompt_token_ids=ids))
    d.on_new_request(asked)
    (expect,) = step(p, {"r": computed}).expects
    assert d.matched_tokens(asked, 0) == (computed, True)
    d.allocated(asked, [1, 2, 3], computed)
    (land,) = step(d).lands
    assert (land.start_token, land.end_token) == (0, computed) and len(land.block_ids) == -(-computed // BLOCK)
    assert expect.prompt is not None and land.prompt == expect.prompt.whole == prompt_digest(ids)


def test_both_roles_in_one_engine() -> None:
    one = side("kv_both")
    out, inward = source("out"), landing("in")
    one.on_new_request(out)
    one.on_new_request(inward)
    one.allocated(inward, [1, 2, 3], 39)
    made = step(one, {"out": 40})
    assert [x.request for x in made.expects] == [x.request for x in made.readies] == ["out"]
    assert [x.request for x in made.lands] == ["in"] and not made.idle


class TestInvariants:
    """With `debug_invariants` each step looks; all tests above run with it."""

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    def test_what_is_left_of_an_ended_request_ends_the_engine(self, role: str) -> None:
        one = side(role)
        request = source() if role == "kv_producer" else landing()
        one.on_new_request(request)
        step(one)
        assert one._live is not None
        one._live.discard("r")  # as if the engine were done with it, and nobody had told us
        with pytest.raises(InvariantBroken, match=r"engine, scheduler: (sources|landings) of ended requests are left"):
            step(one)

    def test_a_source_that_was_released_and_not_forgotten(self) -> None:
        p, request = side("kv_producer"), source()
        p.on_new_request(request)
        step(p, {"r": 40})
        request.num_computed_tokens = 40
        p.finished(request, [10, 11, 12])
        step(p)
        p._sources["r"].released = True
        with pytest.raises(InvariantBroken, match="sources that nobody waits for"):
            step(p)

    def test_a_transfer_id_that_nobody_has(self) -> None:
        p = side("kv_producer")
        p._transfer_ids.add(TransferId("lost"))
        with pytest.raises(InvariantBroken, match=r"transfer ids .*lost"):
            step(p)
