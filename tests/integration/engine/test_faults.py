"""Each fault does what it says, and the pair answers rightly or with one error; afterwards all is as before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from sim_tier import Ask, Got, ask_all, inject, right, simulated

from kvferry.launch.deployment import Deployment

ARGS = ("--enable-faults", "--no-enable-prefix-caching")
ASK = Ask(range(1000, 1200), 6)


def timed(deployment: Deployment, side: str, **fault: object) -> tuple[Got, float]:
    async def run() -> tuple[Got, float]:
        await inject(deployment.engine(side).url, **fault)
        began = time.monotonic()
        [got] = await ask_all(deployment.router_url, deployment.model_name(), [ASK])
        return got, time.monotonic() - began

    return asyncio.run(run())


def well(deployment: Deployment) -> None:
    [got] = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), [ASK]))
    assert got.tokens == right(ASK), got.body


def test_delays_only_delay(tmp_path: Path) -> None:
    with simulated(tmp_path, "push", vllm_args=ARGS) as deployment:
        for side, fault in (
            ("prefill-0", {"kind": "slow_link", "op": "WRITE", "delay_s": 0.6}),
            ("prefill-0", {"kind": "delay", "message": "Landed", "seconds": 0.6}),
            ("decode-0", {"kind": "delay", "message": "Register", "seconds": 0.6}),
            ("decode-0", {"kind": "freeze", "seconds": 0.6}),
            ("prefill-0", {"kind": "freeze", "seconds": 0.6}),
        ):
            got, took = timed(deployment, side, **fault)
            assert got.tokens == right(ASK), got.body
            assert 0.6 <= took < 2.0, (fault, took)
            asyncio.run(inject(deployment.engine(side).url, kind="clear"))
            well(deployment)


def test_slow_reads_slow_pull_only(tmp_path: Path) -> None:
    with simulated(tmp_path, "pull", vllm_args=ARGS, extra_config={"pull_by": "read"}) as deployment:
        _, took = timed(deployment, "decode-0", kind="slow_link", op="WRITE", delay_s=0.6)
        assert took < 0.6
        got, took = timed(deployment, "decode-0", kind="slow_link", op="READ", delay_s=0.6)
        assert got.tokens == right(ASK) and took >= 0.6


def test_a_lost_message_ends_in_one_error(tmp_path: Path) -> None:
    limits = {"transfer_timeout_s": 1.0, "registration_timeout_s": 1.0, "lease_s": 2.0, "prefill_timeout_s": 3.0}
    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config=limits) as deployment:
        for side, message in (("prefill-0", "Landed"), ("decode-0", "Register")):
            got, took = timed(deployment, side, kind="drop", message=message)
            assert got.status in (502, 504), got.body
            assert took < 6.0
            well(deployment)


def test_a_prefill_engine_that_dies_while_it_posts(tmp_path: Path) -> None:
    with simulated(tmp_path, "push", vllm_args=ARGS) as deployment:
        got, took = timed(deployment, "prefill-0", kind="die", at="posted")
        assert got.status in (502, 503), got.body
        assert took < 5.0
        assert [process.name for process in deployment.dead()] == ["prefill-0"]
        deployment.restart("prefill-0")
        began = time.monotonic()
        while True:
            [got] = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), [ASK]))
            if got.status == 200 or time.monotonic() - began > 15:
                break
        assert got.tokens == right(ASK), got.body
