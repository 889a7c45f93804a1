"""What a soak asks, with the right answers: a sim engine's follow from the prompt, vLLM's come from a run before."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvferry.bench.soak_client import Ask
from kvferry.engine.content import answer
from kvferry.engine.profile import load
from kvferry.launch.cancel import Cancel
from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec
from kvferry.launch.web import post_json

Next = Callable[[], Ask]
LENGTHS = ((1, 15), (16, 17), (33, 200), (200, 800), (800, 3000))
"""Of prompts, each range as often: shorter than a block, about one, and many."""
OUTPUTS = (1, 2, 8, 40)
_STEMS, _STEM = 6, 400
_KEPT = 48
"""So many prompts a vLLM engine answers beforehand."""
VLLM_LENGTHS = ((1, 15), (30, 34), (60, 300), (300, 900))
VLLM_OUTPUTS = (1, 4, 12)


def of_sim(profile: str, seed: int) -> Next:
    """Endless; a third of the prompts begin as others do."""
    draw, found = random.Random(seed), load(profile)
    shape = (found.shape.layers, found.shape.kv_heads, found.shape.cell_bytes)
    stems = [_tokens(draw, _STEM) for _ in range(_STEMS)]

    def next_ask() -> Ask:
        stem = draw.choice(stems)[: draw.randrange(_STEM)] if draw.random() < 0.33 else []
        prompt = [*stem, *_tokens(draw, draw.randint(*draw.choice(LENGTHS)))]
        outputs = draw.randint(1, draw.choice(OUTPUTS))
        return Ask(prompt, answer(prompt, outputs, shape, found.limits.vocab_size))

    return next_ask


def of_vllm(spec: DeploymentSpec, seed: int, say: Callable[[str], None], cancel: Cancel) -> Next:
    """One colocated engine of this spec, without a connector, answers each prompt alone, greedily; then it is stopped.
    Afterwards prompts are drawn from those."""
    draw = random.Random(seed)
    plain = replace(
        spec,
        mode="colocated",
        prefill=1,
        decode=1,
        decode_args=(),
        extra_config={},
        decode_extra_config={},
        router=False,
    )
    asks = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(replace(plain, state_dir=Path(folder)), report=say, cancel=cancel) as deployment,
    ):
        url, model = deployment.engines[0].url, deployment.model_name()
        for index in range(_KEPT):
            prompt = _tokens(draw, draw.randint(*VLLM_LENGTHS[index % len(VLLM_LENGTHS)]))
            body = {"model": model, "prompt": prompt, "max_tokens": draw.choice(VLLM_OUTPUTS), "temperature": 0}
            cancel.check()
            reply = post_json(f"{url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
            asks.append(Ask(prompt, reply["choices"][0]["token_ids"]))
        say(f"{len(asks)} prompts answered by one colocated engine")
    return lambda: draw.choice(asks)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(256, 30_000) for _ in range(count)]
