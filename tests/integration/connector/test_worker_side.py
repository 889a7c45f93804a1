"""The worker half: commands in order, each result reported once, idle steps that sleep on the transfers' signal."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: run `make setup`")

from kvferry.config import connector_config
from kvferry.connector.metadata import IDLE, NOTHING, Reject, StepMetadata
from kvferry.connector.worker_side import WorkerSide
from kvferry.ids import EngineId, TransferId
from kvferry.story import Story
from kvferry.transfer.commands import Abort, Failing, Land, Ready, Received, Sent
from kvferry.transfer.peers import Identity

T = TransferId("t")


class Transfers:
    """Stands for the transfer thread."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.ready: list[Any] = []
        self.waits: list[float] = []

    def submit(self, command: Any) -> None:
        self.submitted.append(command)
        if isinstance(command, Abort):
            self.ready.append(Sent(command.request, command.transfer_id, False, "aborted", command.reason))

    def pending(self) -> bool:
        return bool(self.ready)

    def results(self) -> list[Any]:
        out, self.ready = self.ready, []
        return out

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        pass


def worker(role: str = "consumer", ratio: int = 1) -> tuple[WorkerSide, Transfers]:
    identity = Identity(EngineId("e"), 0, 1, role)
    one = WorkerSide(connector_config({}, {}), identity, None, Story(None, "x"))  # type: ignore[arg-type]
    transfers = Transfers()
    one._transfers, one._ratio = transfers, ratio  # type: ignore[assignment]
    return one, transfers


def land(request: str, start: int = 0, end: int = 39) -> Land:
    return Land(T, request, "push", "h", 1, "", 0, start, end, (5, 6, 7))


def run(one: WorkerSide, step: StepMetadata) -> tuple[set[str], set[str], set[str]]:
    one.fence(step)
    one.bind(step)
    one.forward_done()
    return one.results()


def test_a_landing_is_reported_once_and_only_if_awaited() -> None:
    """C61: what comes late, twice or for nobody changes nothing."""
    one, transfers = worker()
    assert run(one, StepMetadata(lands=[land("a"), land("empty", 39)], news=True)) == (set(), set(), set())
    done = Received("a", T, True, "", "")
    transfers.ready = [done, Received("empty", T, True, "", ""), Received("stranger", T, True, "", "")]
    assert run(one, NOTHING) == (set(), {"a"}, set())
    transfers.ready = [done]
    assert run(one, NOTHING) == (set(), set(), set())


def test_a_failed_landing_is_both_received_and_failed() -> None:
    one, transfers = worker()
    run(one, StepMetadata(lands=[land("a")], news=True))
    transfers.ready = [Received("a", T, False, "peer_gone", "")]
    assert run(one, NOTHING) == (set(), {"a"}, {"a"})


def test_a_doomed_landing_fails_now_and_is_received_later() -> None:
    """C43: the client needn't wait for a stopped writer; its blocks must."""
    one, transfers = worker()
    run(one, StepMetadata(lands=[land("a")], news=True))
    transfers.ready = [Failing("a", T, "peer_gone", "")]
    assert run(one, NOTHING) == (set(), set(), {"a"})
    transfers.ready = [Received("a", T, False, "peer_gone", "")]
    assert run(one, NOTHING) == (set(), {"a"}, {"a"})


def test_a_reject_is_reported_in_its_own_step() -> None:
    one, _ = worker()
    assert run(one, StepMetadata(rejects=[Reject("a", "t", "bad", "why")], news=True)) == (set(), {"a"}, {"a"})


def test_kernel_blocks() -> None:
    """A scheduler block is `ratio` kernel blocks, in order."""
    one, transfers = worker(ratio=2)
    run(one, StepMetadata(lands=[land("a")], news=True))
    assert transfers.submitted[0].block_ids == (10, 11, 12, 13, 14, 15)


def test_a_fence_waits_for_the_transfers_end() -> None:
    one, transfers = worker("producer")
    fence = Abort(T, "a", "preempted")
    sent, _, _ = run(one, StepMetadata(fences=[fence], news=True))
    assert transfers.submitted == [fence] and sent == {"a"}


def test_hand_over_follows_the_forward_once() -> None:
    import torch

    one, transfers = worker("producer")
    one._scratch = torch.zeros(1)
    ready = Ready(T, "a", (1, 2), 20)
    step = StepMetadata(readies=[ready])
    one.bind(step)
    assert transfers.submitted == []
    one.forward_done()
    one.forward_done()
    one.results()
    assert transfers.submitted == [ready]


@pytest.mark.parametrize(("role", "longest"), [("consumer", 0.05), ("producer", 0.005)])
def test_idle_steps_sleep_longer_and_longer(role: str, longest: float) -> None:
    one, transfers = worker(role)
    for _ in range(10):
        run(one, IDLE)
    assert transfers.waits[:3] == [0.001, 0.002, 0.004] and transfers.waits[-1] == longest
    run(one, StepMetadata(lands=[land("a")], news=True))
    run(one, IDLE)
    assert transfers.waits[-1] == 0.001, "news starts it anew"
    run(one, NOTHING)
    assert len(transfers.waits) == 11, "steps with model work never sleep"
