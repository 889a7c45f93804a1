"""Every wrong pairing ends within seconds with one typed reason, and both engines go on serving."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_tier import Legs, asking, at_baseline, deployed, key_of, landing_params, metric, side_channel, source_params

from kvferry.errors import LaunchError
from kvferry.ids import new_transfer_id
from kvferry.launch.deployment import Deployment
from kvferry.protocol.messages import Verdict
from kvferry.story import read_story
from kvferry.transfer import inquiry

PROMPT = list(range(1000, 1200))
LEASE_S = 3.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    limits = {"lease_s": LEASE_S, "registration_timeout_s": 3.0}
    args = ("--block-size", "32", "--no-enable-prefix-caching")
    with deployed(tmp_path_factory.mktemp("errors"), mode="push", extra_config=limits, vllm_args=args) as deployment:
        yield deployment


@pytest.fixture
async def legs(pair: Deployment) -> AsyncIterator[Legs]:
    """Both engines must be well, and hold nothing, after every test."""
    async with asking() as session:
        legs = Legs(session, pair)
        yield legs
        await at_baseline(legs, legs.prefill, 2.0 + LEASE_S)
        await at_baseline(legs, legs.decode, 2.0 + LEASE_S)
        _, first, second = await legs.transfer("push", PROMPT, 4)
        assert (first.status, second.status) == (200, 200), (first.body, second.body)


async def fails(legs: Legs, params: dict[str, Any], at_least_s: float = 0.0) -> Verdict:
    """Ask D alone; it must fail within 5 s. How D's side channel explains it."""
    started = time.monotonic()
    reply = await legs.ask(legs.decode, PROMPT, 4, params)
    took = time.monotonic() - started
    assert reply.status == 500 and reply.body["error"]["message"]
    assert at_least_s <= took < 5.0
    return await inquiry.why(*side_channel(legs.decode), params["transfer_id"], key=key_of(legs.decode))


async def test_modes_differ(legs: Legs) -> None:
    transfer_id = new_transfer_id()
    source = asyncio.create_task(legs.ask(legs.prefill, PROMPT, 1, source_params(transfer_id, "push")))
    verdict = await fails(legs, landing_params(transfer_id, "pull", legs.prefill))
    assert verdict.code == "mode_mismatch"
    assert "prefill side has 'push'" in verdict.reason and "decode side has 'pull'" in verdict.reason
    assert (await source).status == 200


async def test_another_prompt_under_the_same_id(legs: Legs) -> None:
    """Of the same length: only the token ids tell."""
    transfer_id = new_transfer_id()
    source = asyncio.create_task(legs.ask(legs.prefill, PROMPT[::-1], 1, source_params(transfer_id, "push")))
    verdict = await fails(legs, landing_params(transfer_id, "push", legs.prefill))
    assert verdict.code == "prompt_mismatch" and "the first 199 token ids differ" in verdict.reason
    assert (await source).status == 200


async def test_wrong_tp_size(legs: Legs) -> None:
    verdict = await fails(legs, landing_params(new_transfer_id(), "push", legs.prefill, remote_tp_size=2))
    assert verdict.code == "wrong_tp_size"
    assert "remote_tp_size: the request says 2" in verdict.reason and "has 1" in verdict.reason


async def test_another_engine_listens_there(legs: Legs) -> None:
    """C69: expected and found engine id."""
    verdict = await fails(legs, landing_params(new_transfer_id(), "push", legs.prefill, remote_engine_id="prefill-9"))
    assert verdict.code == "wrong_engine"
    assert "'prefill-9'" in verdict.reason and "'prefill-0'" in verdict.reason


async def test_peer_not_reachable(legs: Legs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening
        port = taken.getsockname()[1]
        params = landing_params(new_transfer_id(), "push", legs.prefill, remote_port=port)
        verdict = await fails(legs, params)
    assert verdict.code == "peer_unreachable" and f"127.0.0.1:{port} cannot be reached" in verdict.reason


async def test_side_channel_accepts_and_stays_mute(legs: Legs) -> None:
    """C70: the request fails in time; a running token stream on the same engine has no gap over 1 s."""
    body = {"model": legs.model, "prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True, "stream": True}
    times = []

    async def stream() -> None:
        async with legs.session.post(f"{legs.decode.url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data:"):
                    times.append(time.monotonic())

    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        streaming = asyncio.create_task(stream())
        port = server.sockets[0].getsockname()[1]
        verdict = await fails(legs, landing_params(new_transfer_id(), "push", legs.prefill, remote_port=port))
        await streaming
    assert verdict.code == "peer_unreachable"
    assert len(times) > 100 and max(b - a for a, b in itertools.pairwise(times)) < 1.0


@pytest.mark.parametrize("missing", ["transfer_id", "remote_host", "remote_port"])
async def test_without_coordinates(missing: str, legs: Legs) -> None:
    """C68: 400 naming the field; the same process answers the next request."""
    params = landing_params(new_transfer_id(), "push", legs.prefill)
    del params[missing]
    reply = await legs.ask(legs.decode, PROMPT, 4, params)
    assert reply.status == 400
    assert f"kv_transfer_params.{missing} is missing" in reply.body["error"]["message"]


async def test_prefill_never_comes(legs: Legs) -> None:
    verdict = await fails(legs, landing_params(new_transfer_id(), "push", legs.prefill), at_least_s=2.9)
    assert verdict.code == "prefill_never_came" and "within 3 s" in verdict.reason


async def test_no_registration_ever_comes(legs: Legs, pair: Deployment) -> None:
    """C39: P frees once its lease is over, and says why."""
    transfer_id = new_transfer_id()
    reply = await legs.ask(legs.prefill, PROMPT, 1, source_params(transfer_id, "push"))
    assert reply.status == 200 and await metric(legs, legs.prefill, "kv_cache_usage_perc") > 0
    await at_baseline(legs, legs.prefill, LEASE_S + 1.5)
    verdict = await inquiry.why(*side_channel(legs.prefill), transfer_id, key=key_of(legs.prefill))
    assert (verdict.state, verdict.code) == ("failed", "lease_lapsed")
    events = {line["event"]: line["t"] for line in read_story(Path(pair.spec.state_dir) / "story", transfer_id)}
    assert LEASE_S - 0.05 <= events["released"] - events["computed"] < LEASE_S + 0.5
    # C40, C57: whoever comes now is refused at once, and nothing comes back to life.
    started = time.monotonic()
    late = await fails(legs, landing_params(transfer_id, "push", legs.prefill))
    assert late.code == "lease_lapsed" and "unknown or expired transfer" in late.reason
    assert time.monotonic() - started < 1.0


async def test_served_twice(legs: Legs) -> None:
    """C57: parameters sent a second time get no second answer."""
    transfer_id, first, second = await legs.transfer("pull", PROMPT, 4)
    assert (first.status, second.status) == (200, 200)
    verdict = await fails(legs, first.body["kv_transfer_params"])
    assert verdict.code == "expired_transfer" and transfer_id in verdict.reason


async def test_abandoned_by_the_router(legs: Legs) -> None:
    """C31, C59: nobody will come for it, and P is told: it doesn't wait for the lease."""
    transfer_id = new_transfer_id()
    await legs.ask(legs.prefill, PROMPT, 1, source_params(transfer_id, "pull"))
    assert await inquiry.abandon(*side_channel(legs.prefill), transfer_id, "the client left", key=key_of(legs.prefill))
    await at_baseline(legs, legs.prefill, 2.0)


async def test_client_leaves_while_decode_waits(legs: Legs) -> None:
    """C30: D gives the blocks back when P has confirmed that it will not write them."""
    transfer_id = new_transfer_id()
    params = landing_params(transfer_id, "push", legs.prefill)
    waiting = asyncio.create_task(legs.ask(legs.decode, PROMPT, 4, params))
    async with asyncio.timeout(5):
        while (await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))).state != "open":
            await asyncio.sleep(0.02)
    waiting.cancel()
    async with asyncio.timeout(2):
        d = legs.decode
        while (verdict := await inquiry.why(*side_channel(d), transfer_id, key=key_of(d))).state == "open":
            await asyncio.sleep(0.02)
    assert (verdict.state, verdict.code) == ("failed", "cancelled")
    await at_baseline(legs, legs.decode, 2.0)


async def test_decode_queue_aborted(legs: Legs) -> None:
    """C33: 20 queued requests are aborted, most before they have blocks; the same process answers the next."""
    pid = legs.decode.pids()
    tasks = []
    for _ in range(20):
        params = landing_params(new_transfer_id(), "push", legs.prefill)
        tasks.append(asyncio.create_task(legs.ask(legs.decode, PROMPT, 4, params)))
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await at_baseline(legs, legs.decode, 4.0)
    assert legs.decode.pids() == pid


def test_dtypes_differ(tmp_path: Path) -> None:
    """C79: refused at the handshake, naming the field and both values; both engines go on."""

    async def check(deployment: Deployment) -> None:
        async with asking() as session:
            legs = Legs(session, deployment)
            verdict = await fails(legs, landing_params(new_transfer_id(), "push", legs.prefill))
            assert verdict.code == "incompatible_engines"
            assert "dtype" in verdict.reason and "float32" in verdict.reason and "bfloat16" in verdict.reason
            for engine in (legs.prefill, legs.decode):
                assert (await legs.ask(engine, PROMPT, 4)).status == 200

    with deployed(tmp_path, mode="push", prefill_args=("--dtype=float32",)) as deployment:
        asyncio.run(check(deployment))


def test_side_channel_port_taken(tmp_path: Path) -> None:
    """C66: the engine doesn't start, and one line says which port and which setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = {"side_channel_port": port}
        with pytest.raises(LaunchError) as caught, deployed(tmp_path, mode="push", prefill_extra_config=config):
            pass
    assert f"side channel 127.0.0.1:{port} is taken" in str(caught.value)
    assert "side_channel_port" in str(caught.value)


async def test_stopped_prefill_engine_keeps_its_claim_on_the_blocks(legs: Legs) -> None:
    """C43: P is stopped while D waits. The client hears of it in time; D's blocks stay until P has spoken again."""
    transfer_id = new_transfer_id()
    processes = [psutil.Process(pid) for pid in legs.prefill.pids()]
    source = asyncio.create_task(legs.ask(legs.prefill, list(range(100, 2600)), 1, source_params(transfer_id, "push")))
    params = landing_params(transfer_id, "push", legs.prefill)
    landing = asyncio.create_task(legs.ask(legs.decode, list(range(100, 2600)), 4, params))
    await asyncio.sleep(0.5)  # P computes for seconds
    for process in processes:
        process.suspend()
    try:
        reply = await asyncio.wait_for(landing, LEASE_S + 3)
        assert reply.status == 500
        verdict = await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))
        assert (verdict.state, verdict.code) == ("failed", "peer_gone") and "silent for 3 s" in verdict.reason
        assert (await legs.ask(legs.decode, PROMPT, 4)).status == 200
        assert await metric(legs, legs.decode, "kv_cache_usage_perc") > 0, "given back while P could still write"
    finally:
        for process in processes:
            process.resume()
    await source
