"""What cores record of their transfers, and say of their load, over the in-memory fabric."""

from __future__ import annotations

from transfer_house import BLOCK, PLANES, TOKEN, House, Rank, expect, land, pair, ready

from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.stats import Levels, TransferStats

TOKEN_BYTES = PLANES * 2 * TOKEN


def since(rank: Rank) -> TransferStats:
    return rank.core.stats.take() or TransferStats()


def levels(house: House, rank: Rank) -> Levels:
    """As last told, once the core has had the time to."""
    house.wait(0.02, 0.02)
    told = since(rank).levels
    return told.get(str(rank.core.identity.rank), rank.core.stats._levels)


def test_a_transfer_is_counted_where_it_is_posted_and_where_it_ends(house: House, mode: str) -> None:
    p, d = pair(house, mode)
    assert (since(p), since(d)) == (TransferStats(), TransferStats())
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode)
    house.run()
    of_p, of_d = since(p), since(d)
    posting, other = (of_d, of_p) if mode == "pull" else (of_p, of_d)
    assert posting.nbytes == [3 * BLOCK * TOKEN_BYTES] and posting.descriptors == [3 * PLANES]
    assert len(posting.plan_s) == len(posting.post_s) == len(posting.wire_s) == 1
    assert other.nbytes == other.plan_s == []
    assert (of_p.ended, of_d.ended) == ({"prefill": {"ok": 1}}, {"decode": {"ok": 1}})
    assert (of_d.blocks, of_d.runs, of_p.blocks) == ([3], [3], [])
    assert levels(house, p) == levels(house, d) == Levels()


def test_neighbouring_blocks_are_one_run(house: House) -> None:
    p, d = pair(house)
    expect(p)
    ready(p)
    land(d, blocks=(7, 8, 9))
    house.run()
    assert (since(d).runs, since(p).descriptors) == ([1], [PLANES])


def test_a_post_that_breaks_is_counted(house: House, mode: str) -> None:
    p, d = pair(house, mode)
    house.world.hold = True
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode)
    house.run()
    (copy,) = house.world.copies
    house.world.hold = False
    copy.error = "link flapped"
    house.wait(2.0)
    of_p, of_d = since(p), since(d)
    assert [one.failed_posts for one in (of_p, of_d)] == ([0, 1] if mode == "pull" else [1, 0])
    assert of_p.nbytes == of_d.nbytes == [] and of_d.ended == {"decode": {d.results[0].code: 1}}


def test_what_is_open_shows_while_it_is(house: House) -> None:
    p, d = pair(house)
    house.world.hold = True
    land(d)
    expect(p)
    house.run()
    assert (levels(house, p), levels(house, d)) == (Levels(sources=1), Levels(landings=1))
    ready(p)
    house.run()
    assert (levels(house, p), levels(house, d)) == (Levels(sources=1, posts=1), Levels(landings=1))
    described = p.core._answers.to(wire.Describe())
    assert isinstance(described, wire.Description)
    assert (described.open_transfers, described.backlog_bytes) == (1, 0)
    house.world.hold = house.world.copies[0].held = False
    house.run()
    assert p.results and d.results
    for one in (p, d):
        assert since(one).levels == {"0": Levels()}, "told with the result: the engine may not look again"


def test_kv_that_waits_to_be_written(house: House) -> None:
    """Four WRITEs to one peer may be in flight."""
    p, d = pair(house, "stream", stream_chunk_bytes=1)
    house.world.hold = True
    p.core.submit(cmd.Expect("t", "p-t", "stream", 1, 6 * BLOCK))
    grown = [cmd.Grown("t", "p-t", (index,), (index + 1) * BLOCK) for index in range(6)]
    p.core.submit(grown[0])
    house.run()
    assert levels(house, p).backlog_bytes == 0, "nobody has registered for it"
    land(d, mode="stream", blocks=tuple(range(6, 12)), end=6 * BLOCK)
    house.run()
    for one in grown[1:]:
        p.core.submit(one)
        house.run()
    waiting = 2 * BLOCK * TOKEN_BYTES
    assert levels(house, p) == Levels(sources=1, posts=4, backlog_bytes=waiting)
    described = p.core._answers.to(wire.Describe())
    assert isinstance(described, wire.Description) and described.backlog_bytes == waiting
    house.world.hold = False
    for copy in house.world.copies:
        copy.held = False
    p.core.submit(cmd.Ready("t", "p-t", tuple(range(6)), 6 * BLOCK))
    house.run()
    of_p = since(p)
    assert sum(of_p.nbytes) == 6 * BLOCK * TOKEN_BYTES and len(of_p.nbytes) == 5
    assert d.results[0].ok and levels(house, p) == Levels()


def test_blocks_of_a_request_that_failed_under_a_silent_writer(house: House) -> None:
    """The failure counts at once, and once; the blocks show until they go back."""
    p, d = pair(house, lease_s=3.0)
    house.world.hold = True
    expect(p)
    ready(p)
    land(d)
    house.run()
    (copy,) = house.world.copies
    house.freeze(p)
    house.wait(20.0)
    assert since(d).ended == {"decode": {"peer_gone": 1}} and d.results == []
    assert levels(house, d) == Levels(landings=1, quarantined_blocks=3)
    copy.held = house.world.hold = False
    house.freeze(p, False)
    house.wait(2.0)
    assert len(d.results) == 1
    told = since(d)
    assert (told.ended, told.levels["0"]) == ({}, Levels())


def test_blocks_of_aborted_requests_while_a_write_runs(house: House) -> None:
    p, d = pair(house)
    house.world.hold = True
    expect(p)
    ready(p)
    land(d)
    house.run()
    d.core.submit(cmd.Drop("d-t"))
    p.core.submit(cmd.Abort("t", "p-t", "the client left", held=True))
    house.run()
    assert levels(house, d).quarantined_blocks == levels(house, p).quarantined_blocks == 3
    house.world.hold = house.world.copies[0].held = False
    house.run()
    assert levels(house, d) == levels(house, p) == Levels()


def test_ranks_count_blocks_once(house: House) -> None:
    p = house.rank("P", "producer", 5600, heads=4, total=4)
    ds = [house.rank("D", "consumer", 6600, rank=rank, tp=2, heads=2, total=4) for rank in range(2)]
    expect(p)
    ready(p)
    for d in ds:
        land(d)
    house.run(30)
    whole = since(ds[0])
    whole.add(since(ds[1]))
    assert (whole.blocks, whole.runs, whole.ended) == ([3], [3], {"decode": {"ok": 2}})
    assert sum(since(p).nbytes) == 3 * BLOCK * 2 * TOKEN_BYTES
