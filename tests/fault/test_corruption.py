"""With `verify_kv: full` every byte that changes on its way is found, and nothing else is complained of.

How many: `KVFERRY_CORRUPTIONS` (default 20) and `KVFERRY_CLEAN` (default 400) over the memory fabric, a tenth and a
fortieth of them over NIXL between transport-real engines. 200 and 20,000 take some minutes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
from pathlib import Path

import pytest
from sim_tier import ask_all, asks, inject, right, simulated
from transfer_house import BLOCK, DP, PLANES, PP, TOKEN, House, Rank, expect, land, randomise, ready

from kvferry.transfer import commands as cmd

CORRUPTED = int(os.environ.get("KVFERRY_CORRUPTIONS", "20"))
CLEAN = int(os.environ.get("KVFERRY_CLEAN", "400"))
POOL = 16
pytestmark = pytest.mark.timeout(3600)


def pairs() -> list[tuple[House, str, Rank, Rank, list[Rank]]]:
    """Each mode with one rank on each side, and with D's heads on two: house, mode, P, the first D, all Ds."""
    made = []
    for mode in ("push", "pull", "stream"):
        for tp in (1, 2):
            house = House()
            config = {"mode": mode, "verify_kv": "full", "stream_chunk_bytes": 1}
            p = house.rank("P", "producer", PP, **config)
            peers = [f"127.0.0.1:{PP}"]
            ds = [
                house.rank("D", "consumer", DP, rank=rank, tp=tp, heads=2 // tp, peers=peers, **config)
                for rank in range(tp)
            ]
            house.run()
            made.append((house, mode, p, ds[0], ds))
    return made


class Traffic:
    """Transfers of random blocks, one after the other. `flip`: a byte of D's memory that changes when it arrives."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pairs = pairs()
        self.count = 0

    def close(self) -> None:
        for house, *_ in self.pairs:
            house.settled()
            for rank in house.ranks:
                rank.core.close()

    def one(self, flips: bool) -> list[cmd.Result]:
        """What D's ranks said."""
        draw = self.draw
        house, mode, p, _, ds = draw.choice(self.pairs)
        self.count += 1
        tid, count = f"t{self.count}", draw.randint(1, 8)
        tokens = count * BLOCK - draw.randrange(BLOCK)
        sources, targets = (tuple(draw.sample(range(POOL), count)) for _ in range(2))
        randomise(p, seed=self.count)
        hit = draw.choice(ds) if flips else None
        expected = self._place(hit, targets, tokens) if hit is not None else ""
        steps = ["expect", "land", "grow", "ready"]
        if draw.random() < 0.5:
            steps = ["land", "expect", "grow", "ready"] if draw.random() < 0.5 else ["expect", "grow", "ready", "land"]
        for step in steps:
            if step == "expect":
                expect(p, tid, mode)
            elif step == "land":
                for d in ds:
                    land(d, tid, mode, targets, 0, tokens, tp=1)
            elif step == "grow" and mode == "stream" and count > 1:
                p.core.submit(cmd.Grown(tid, f"p-{tid}", sources[: count // 2], count // 2 * BLOCK))
            elif step == "ready":
                ready(p, tid, sources, tokens)
            house.run(2)
        house.run(14)
        house.world.on_move = lambda start, nbytes: None
        said = [d.results.pop() for d in ds]
        assert all(not d.results for d in ds) and p.results.pop().ok and not p.results
        if hit is not None:
            (found,) = [one for d, one in zip(ds, said, strict=True) if d is hit]
            assert found.code == "kv_mismatch" and found.reason.startswith(expected), (found, expected)
            assert all(one.ok for d, one in zip(ds, said, strict=True) if d is not hit), said
        return said

    def _place(self, d: Rank, targets: tuple[int, ...], tokens: int) -> str:
        """Arms one flip somewhere in what will land; how the reason must begin."""
        draw, heads = self.draw, d.memory.shape[2]
        plane, head, token = draw.randrange(PLANES), draw.randrange(heads), draw.randrange(tokens)
        block, mask = targets[token // BLOCK], draw.randint(1, 255)
        address = d.memory[plane, block, head].ctypes.data + token % BLOCK * TOKEN + draw.randrange(TOKEN)
        (house,) = [one[0] for one in self.pairs if d in one[4]]

        def flip(start: int, nbytes: int) -> None:
            if start <= address < start + nbytes:
                ctypes.c_ubyte.from_address(address).value ^= mask

        house.world.on_move = flip
        return f"layer {plane}, block {block}, tokens {token // BLOCK * BLOCK} to "


def test_every_changed_byte_is_found_and_named() -> None:
    traffic = Traffic(seed=11)
    found = 0
    for _ in range(CORRUPTED):
        found += sum(one.code == "kv_mismatch" for one in traffic.one(flips=True))
    print(f"memory fabric: {found} of {CORRUPTED} corruptions found")
    assert found == CORRUPTED
    traffic.close()


def test_clean_transfers_raise_no_alarm() -> None:
    traffic = Traffic(seed=12)
    alarms = [one for _ in range(CLEAN) for one in traffic.one(flips=False) if not one.ok]
    print(f"memory fabric: {len(alarms)} alarms in {CLEAN} clean transfers")
    assert alarms == []
    traffic.close()


@pytest.mark.nixl
def test_the_same_over_nixl(tmp_path: Path) -> None:
    """Flipped in D's memory after the WRITEs or READs, before P says that they were all."""
    corrupted, clean = max(4, CORRUPTED // 10), max(20, CLEAN // 40)
    draw, found, alarms = random.Random(13), 0, 0
    args, chunks = ("--enable-faults", "--no-enable-prefix-caching"), ("--max-num-batched-tokens=64",)
    full = {"verify_kv": "full", "stream_chunk_bytes": 1}
    judging_none = ("--breaker-failures=0", "--no-outlier-ejection")  # who fails so often in a row is left out

    async def run(url: str, decode: str, model: str, mode: str) -> None:
        nonlocal found, alarms
        what = [one for one in asks(3 * (corrupted + 1), seed=14, outputs=3) if len(one.prompt) > 17]
        for ask in what[: -(-corrupted // 3)]:
            await inject(decode, kind="corrupt", when="in_flight", mask=draw.randint(1, 255))
            [got] = await ask_all(url, model, [ask])
            found += got.status == 502 and "digests differ" in json.loads(got.body)["error"]["message"]
        what = asks(-(-clean // 3), seed=15, outputs=3)
        got_all = await ask_all(url, model, what)
        alarms += sum(got.tokens != right(ask) for got, ask in zip(got_all, what, strict=True))

    for mode in ("push", "pull", "stream"):
        how = {"vllm_args": args, "prefill_args": chunks, "extra_config": full, "router_args": judging_none}
        with simulated(tmp_path / mode, mode, **how) as deployment:
            decode = deployment.engine("decode-0").url
            asyncio.run(run(deployment.router_url, decode, deployment.model_name(), mode))
    print(f"NIXL: {found} of {3 * -(-corrupted // 3)} corruptions found, {alarms} alarms in {3 * -(-clean // 3)} clean")
    assert (found, alarms) == (3 * -(-corrupted // 3), 0)
