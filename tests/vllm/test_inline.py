"""`background: false`: the decode engine's own loop plans, posts and polls, and gets the same bytes and tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from vllm_tier import Legs, asking, deployed

from kvferry.launch.deployment import Deployment
from kvferry.story import read_story


async def check(deployment: Deployment) -> None:
    rng = random.Random(3)
    async with asking() as session:
        legs = Legs(session, deployment)
        for length in (1, 33, 200, 700):
            prompt = [rng.randrange(100, 48_000) for _ in range(length)]
            solo = await legs.ask(legs.prefill, prompt, 16)
            transfer_id, first, second = await legs.transfer("pull", prompt, 16)
            assert (first.status, second.status) == (200, 200), (first.body, second.body)
            assert second.token_ids == solo.token_ids
            lines = read_story(Path(deployment.spec.state_dir) / "story", transfer_id)
            digests = {line["side"]: line["digests"] for line in lines if line["event"] == "audit"}
            assert digests["decode"] == digests["prefill"][: len(digests["decode"])]
            assert len(digests["decode"]) == -(-(length - 1) // 32)


def test_pull_in_the_engine_loop(tmp_path: Path) -> None:
    args = ("--block-size", "32", "--no-enable-prefix-caching")
    audit = {"audit": True}
    with deployed(tmp_path, mode="pull-inline", dtype="float32", vllm_args=args, extra_config=audit) as deployment:
        asyncio.run(check(deployment))
