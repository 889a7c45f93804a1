"""What a client gets of a failure behind the router: by vLLM's policy on decode, and with a second try allowed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sim_stages import ARGS, ASK
from sim_tier import ask_all, asks, inject, right, simulated

from kvferry.story import read_lines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("policy", "retries", "status"), [("fail", 0, 502), ("recompute", 0, 200), ("fail", 1, 200)])
def test_kv_that_changed_on_its_way(policy: str, retries: int, status: int, tmp_path: Path) -> None:
    """`fail`: a typed error, or another transfer; `recompute`: decode computes the prompt, and no second is begun."""
    how = {"kv_load_failure_policy": policy, "router_args": ("--retries", str(retries))}
    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config={"verify_kv": "full"}, **how) as deployment:
        asyncio.run(inject(deployment.engine("decode-0").url, kind="corrupt", when="in_flight"))
        [got] = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), [ASK]))
        assert got.status == status, got.body
        if status == 200:
            assert got.tokens == right(ASK)
        else:
            facts = json.loads(got.body)["error"]
            assert (facts["code"], facts["side"]) == ("kv_mismatch", "decode")
        events = [line["event"] for line in read_lines(tmp_path / "state" / "story") if line["side"] == "router"]
    warm = events.count("dispatched") - 1 - retries
    assert warm >= 0 and events.count("failed") == (policy == "fail")


@pytest.mark.parametrize("stage", ["queued", "computed", "registered", "landing"])
def test_an_engine_killed_before_the_first_byte_is_not_noticed(stage: str, tmp_path: Path) -> None:
    """Whichever side dies, and whatever of the transfer there was: another pair answers."""
    who = "prefill-0" if stage in ("queued", "computed") else "decode-0"
    asked = asks(8, seed=3)
    how = {"router_args": ("--retries", "2"), "prefill": 2, "decode": 2, "extra_config": {"lease_s": 3.0}}
    with simulated(tmp_path, "push", vllm_args=ARGS, **how) as deployment:
        asyncio.run(inject(deployment.engine(who).url, kind="die", at=stage))
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=4))
        assert [process.name for process in deployment.dead()] == [who]
        assert [(one.status, one.tokens) for one in got] == [(200, right(ask)) for ask in asked], got
