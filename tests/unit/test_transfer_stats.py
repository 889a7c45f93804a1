"""The record of what transfers did: filled on one thread, taken on another, joined over ranks."""

from __future__ import annotations

import pickle
import random
import sys
import threading

import msgspec
import pytest

from kvferry.ids import TransferId
from kvferry.transfer.commands import Land, Received, Sent
from kvferry.transfer.stats import Levels, Recorder, TransferStats, block_runs

T = TransferId("t")


@pytest.mark.parametrize(
    ("block_ids", "runs"),
    [
        ((), 0),
        ((7,), 1),
        ((0,), 1),
        ((3, 4, 5, 6), 1),
        ((6, 5, 4, 3), 1),
        ((1, 3, 5), 3),
        ((1, 2, 10, 9, 4), 3),
        ((4, 4), 2),
    ],
)
def test_runs_of_block_ids(block_ids: tuple[int, ...], runs: int) -> None:
    assert block_runs(block_ids) == runs


def test_runs_are_what_was_joined() -> None:
    """Upwards or downwards."""
    draw = random.Random(3)
    for _ in range(200):
        starts = draw.sample(range(0, 10_000, 100), draw.randrange(1, 12))
        stretches = [range(start, start + draw.randrange(1, 60))[:: draw.choice([1, -1])] for start in starts]
        assert block_runs([block for stretch in stretches for block in stretch]) == len(stretches)


def land(request: str, blocks: tuple[int, ...], start: int = 0, end: int = 39) -> Land:
    return Land(T, request, "push", "h", 1, "", 0, start, end, blocks)


def moved(recorder: Recorder, nbytes: int = 64) -> None:
    recorder.moved(plan_s=0.1, post_s=0.2, wire_s=0.4, nbytes=nbytes, descriptors=3)


def test_nothing_new_is_nothing() -> None:
    recorder = Recorder()
    assert recorder.take() is None
    moved(recorder)
    taken = recorder.take()
    assert taken is not None and (taken.plan_s, taken.post_s, taken.wire_s) == ([0.1], [0.2], [0.4])
    assert (taken.nbytes, taken.descriptors, taken.eventless) == ([64], [3], False)
    assert recorder.take() is None


def test_a_landing_counts_the_blocks_that_its_tokens_need() -> None:
    """The request's own last token, and those to come, have blocks too."""
    recorder = Recorder()
    assert recorder.allocated(land("a", (4, 5, 9, 10)), 16) == {"tokens": 39, "blocks": 3, "runs": 2}
    assert recorder.allocated(land("b", (8, 9), start=16, end=33), 16) == {"tokens": 17, "blocks": 2, "runs": 1}
    assert recorder.allocated(land("c", (1, 2), start=32, end=32), 16) == {"tokens": 0, "blocks": 0, "runs": 0}
    taken = recorder.take()
    assert taken is not None and (taken.blocks, taken.runs) == ([3, 2], [2, 1]), "the empty one is no landing of KV"


def test_only_rank_0_counts_blocks_which_all_ranks_have() -> None:
    recorder = Recorder(rank=1)
    assert recorder.allocated(land("a", (4, 6)), 32)["runs"] == 2
    assert recorder.take() is None


def test_ends_by_side_and_outcome() -> None:
    recorder = Recorder()
    recorder.ended(Sent("p", T, True, "", ""))
    recorder.ended(Sent("p", T, False, "lease_lapsed", "why"))
    recorder.ended(Received("d", T, True, "", ""))
    recorder.ended(Received("d", T, True, "", ""), counts=False)
    taken = recorder.take()
    assert taken is not None and taken.ended == {"prefill": {"ok": 1, "lease_lapsed": 1}, "decode": {"ok": 1}}


def test_a_doomed_transfer_counts_when_it_fails_and_only_then() -> None:
    """Its blocks come free later, maybe by hours."""
    recorder = Recorder()
    recorder.doomed("d", "peer_gone")
    taken = recorder.take()
    assert taken is not None and taken.ended == {"decode": {"peer_gone": 1}}
    recorder.ended(Received("d", T, False, "peer_gone", ""))
    assert recorder.take() is None
    recorder.ended(Received("d", T, False, "cancelled", ""))
    taken = recorder.take()
    assert taken is not None and taken.ended == {"decode": {"cancelled": 1}}, "a later request of the same name"


def test_levels_are_told_when_they_change() -> None:
    recorder = Recorder(rank=2)
    recorder.level(Levels())
    assert recorder.take() is None
    recorder.level(Levels(sources=1))
    recorder.level(Levels(sources=2, backlog_bytes=10))
    taken = recorder.take()
    assert taken is not None and taken.levels == {"2": Levels(sources=2, backlog_bytes=10)} and taken.eventless
    recorder.level(Levels(sources=2, backlog_bytes=10))
    assert recorder.take() is None
    recorder.level(Levels())
    taken = recorder.take()
    assert taken is not None and taken.levels == {"2": Levels()}


def rank_says(rank: int) -> TransferStats:
    recorder = Recorder(rank)
    moved(recorder, 100 + rank)
    recorder.failed(rank)
    recorder.allocated(land("a", (1, 2, 9)), 16)
    recorder.ended(Sent("p", T, True, "", ""))
    if rank:
        recorder.ended(Received("d", T, False, "peer_gone", ""))
    recorder.level(Levels(posts=rank + 1))
    taken = recorder.take()
    assert taken is not None
    return taken


def test_ranks_are_joined() -> None:
    whole = rank_says(0)
    whole.add(rank_says(1))
    whole.add(rank_says(2))
    assert whole.nbytes == [100, 101, 102] and len(whole.plan_s) == len(whole.descriptors) == 3
    assert whole.failed_posts == 3
    assert whole.ended == {"prefill": {"ok": 3}, "decode": {"peer_gone": 2}}
    assert (whole.blocks, whole.runs) == ([3], [2])
    assert {rank: levels.posts for rank, levels in whole.levels.items()} == {"0": 1, "1": 2, "2": 3}


def test_it_travels_as_pickle_and_as_plain_data() -> None:
    told = rank_says(1)
    assert pickle.loads(pickle.dumps(told)) == told
    plain = msgspec.to_builtins(told)
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), TransferStats) == told


def test_two_threads_lose_nothing() -> None:
    recorder, count = Recorder(), 20_000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        writer = threading.Thread(target=lambda: [moved(recorder, number) for number in range(count)] and None)
        writer.start()
        seen: list[int] = []
        while writer.is_alive() or recorder._news:
            taken = recorder.take()
            if taken is not None:
                assert len(taken.nbytes) == len(taken.wire_s) == len(taken.descriptors)
                seen += taken.nbytes
        writer.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == list(range(count))
