"""Malformed, replayed and uninvited messages by the thousand: nothing is written, nothing crashes, all are counted.

`KVFERRY_FUZZED` (default 10,000): so many for the codec, and as many over CURVE to two engines that serve meanwhile. A
million take some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from fuzzing import fuzzed
from sim_tier import ask_all, asks, right, simulated
from transfer_house import House, expect, land, pair, randomise, ready, same

from kvferry.auth import load_key, make_key_file
from kvferry.bench.witness import engine_metrics
from kvferry.config import parse_address
from kvferry.launch.deployment import Deployment
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import inquiry
from kvferry.transfer.curve import dial_with

FUZZED = int(os.environ.get("KVFERRY_FUZZED", "10000"))
ENGINES = ("prefill-0", "decode-0")
MORE_MIB = 64
pytestmark = pytest.mark.timeout(3600)


def test_the_codec_knows_a_message_or_says_that_it_is_none() -> None:
    ends: Counter[str] = Counter()
    for data in fuzzed(FUZZED, seed=1):
        try:
            message = codec.decode(data)
        except codec.WireError:
            ends["none"] += 1
        else:
            ends["message"] += 1
            assert codec.decode(codec.encode(message)) == message or "nan" in repr(message)
    print(f"codec: {dict(ends)}")
    assert ends.total() == FUZZED and ends["none"] > FUZZED / 2 and ends["message"] > FUZZED / 50


def test_a_registration_that_is_replayed_changes_nothing() -> None:
    """Before its KV comes, and when it has long landed."""
    house, said = House(), list[bytes]()
    p, d = pair(house)
    house.network.filter = lambda data: [data] if not data or said.append(data) is None else []
    expect(p)
    land(d)
    house.run()
    (registration,) = [data for data in said if isinstance(codec.decode(data), wire.Register)]
    (key,) = d.core._channel.dialled
    count = max(100, FUZZED // 10)

    def replay() -> int:
        for _ in range(count):
            d.core._channel.send(key, registration)
            house.run(1)
        taken = p.core.stats.take()
        return 0 if taken is None else taken.turned_away.get("replayed", 0)

    assert replay() == count
    randomise(p)
    ready(p)
    house.run(20)
    assert [one.ok for one in (*p.results, *d.results)] == [True, True] and same(p, d, (1, 2, 3), (7, 5, 9))
    randomise(p, seed=2)
    before = d.memory.copy()
    replay()
    house.run(20)
    assert (d.memory == before).all() and len(p.results) == len(d.results) == 1
    house.settled()
    for rank in house.ranks:
        rank.core.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with simulated(tmp_path_factory.mktemp("pair")) as deployment:
        yield deployment


async def serves(deployment: Deployment, seed: int) -> None:
    what = asks(20, seed)
    got = await ask_all(deployment.router_url, deployment.model_name(), what)
    assert [one.tokens for one in got] == [right(ask) for ask in what], [one.body for one in got if one.status != 200]


def refusals(deployment: Deployment, name: str) -> Counter[str]:
    rows, wanted = engine_metrics(deployment.engine(name).url), "kvferry:side_channel_refusals_total"
    return Counter({labels["reason"]: int(value) for sample, labels, value in rows if sample == wanted})


async def counted(deployment: Deployment, name: str, before: Counter[str], count: int, *reasons: str) -> Counter[str]:
    """What was turned away since; an engine's metrics follow with its steps."""
    for attempt in range(40):
        seen = refusals(deployment, name) - before
        if sum(seen[reason] for reason in reasons) >= count:
            break
        await serves(deployment, 100 + attempt)
    return seen


def dealer(context: zmq.Context, deployment: Deployment, name: str, key_file: str) -> zmq.Socket:
    made = context.socket(zmq.DEALER)
    made.linger, made.rcvhwm = 5000, 0
    dial_with(made, load_key(key_file) if key_file else None)
    made.connect(inquiry.endpoint(*parse_address(deployment.engine(name).side_channel, "side channel")))
    return made


def flood(deployment: Deployment, name: str, count: int, seed: int) -> tuple[int, int]:
    """By one who has the key. (messages that are none, answers that came)."""
    context, none, answers = zmq.Context(), 0, 0
    socket = dealer(context, deployment, name, str(deployment.state_dir.auth_key))
    for number, data in enumerate(fuzzed(count, seed)):
        try:
            codec.decode(data)
        except codec.WireError:
            none += 1
        socket.send(data)
        while number % 100 == 0 and socket.poll(0):
            socket.recv()
            answers += 1
    socket.send(codec.encode(wire.Why(transfer_id="the end")))
    while socket.poll(60_000):
        answers += 1
        reply = socket.recv()
        said = codec.decode(reply) if reply else None
        if isinstance(said, wire.Verdict) and said.transfer_id == "the end":
            break
    else:
        raise AssertionError(f"{name} answers no more")
    socket.close()
    context.term()
    return none, answers


@pytest.mark.nixl
async def test_floods_by_one_who_has_the_key(engines: Deployment) -> None:
    """Each message that is none is counted, by both engines; they answer rightly meanwhile and afterwards, and have not
    grown."""
    await serves(engines, 1)
    before = {name: refusals(engines, name) for name in ENGINES}
    sizes = {name: psutil.Process(engines.engine(name).pid).memory_info().rss for name in ENGINES}
    floods = [asyncio.to_thread(flood, engines, name, FUZZED // 2, seed) for seed, name in enumerate(ENGINES, 2)]
    done = asyncio.gather(*floods)
    served = 0
    while not done.done():
        await serves(engines, 10 + served)
        served += 1
        await asyncio.wait({done}, timeout=0.5)
    for name, (none, answers) in zip(ENGINES, await done, strict=True):
        seen = await counted(engines, name, before[name], none, "malformed", "oversized")
        print(f"{name}: {none} of {FUZZED // 2} are no messages, {answers} answers; refusals {dict(seen)}")
        assert seen["malformed"] + seen["oversized"] == none
        assert engines.engine(name).process.running()
        grown = psutil.Process(engines.engine(name).pid).memory_info().rss - sizes[name]
        assert grown < MORE_MIB << 20, f"{name} has grown by {grown >> 20} MiB"
    assert served
    await serves(engines, 4)


@pytest.mark.nixl
async def test_floods_by_the_uninvited(engines: Deployment, tmp_path: Path) -> None:
    """No key, or another one: not a byte of theirs is looked at, and each connection is counted."""
    wrong = tmp_path / "wrong.key"
    make_key_file(wrong)
    count = max(20, FUZZED // 10_000)
    before = {name: refusals(engines, name) for name in ENGINES}
    context = zmq.Context()
    for number in range(count):
        for name in ENGINES:
            socket = dealer(context, engines, name, str(wrong) if number % 2 else "")
            for data in fuzzed(50, number):
                with contextlib.suppress(zmq.Again):  # it was turned away already, and has nobody to send to
                    socket.send(data, zmq.DONTWAIT)
            await asyncio.sleep(0.02)
            socket.close(linger=0)
    await serves(engines, 5)
    await asyncio.sleep(0.5)
    context.destroy(linger=0)
    for name in ENGINES:
        seen = await counted(engines, name, before[name], count, "wrong_key", "no_handshake")
        print(f"{name}: {count} connections of the uninvited; refusals {dict(seen)}")
        assert seen["wrong_key"] + seen["no_handshake"] >= count and not seen["malformed"]
        assert engines.engine(name).process.running()
