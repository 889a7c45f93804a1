"""Over one running deployment: whether it did what it was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvferry.bench import judge
from kvferry.bench.kv import KvFacts
from kvferry.bench.records import Sample, VoidRun
from kvferry.bench.witness import Engines, Stories
from kvferry.launch.deployment import Deployment


class Watch:
    """Made when the deployment is ready. `label`: how its refusals begin. One thread owns it."""

    def __init__(self, deployment: Deployment, label: str, kv: KvFacts) -> None:
        self._deployment, self._label = deployment, label
        self._engines = Engines({engine.url: engine.role for engine in deployment.engines})
        self._stories = Stories([deployment.state_dir.story])
        self._kv = replace(kv, block_size=kv.block_size or self._engines.block_size())
        self._begun, self._before = time.monotonic(), self._engines.now()

    def asked(
        self, ask: Callable[[], list[Sample]], num: int, input_len: int, output_len: int
    ) -> tuple[list[Sample], int | None]:
        """What `ask` brought back, and the bytes of KV that moved for it; None where nothing tells. Raises `VoidRun`
        and `ProcessDied`.
        """
        before, mode = self._engines.now(), self._deployment.mode
        samples = ask()
        for process in self._deployment.dead():
            raise process.died("while it was measured")
        what = f", {input_len}-token prompts"
        self._refuse(judge.answers(samples, num, input_len, output_len), what)
        nbytes = self._kv.needed(input_len) * num if mode.split else 0
        told = self._engines.since(before, input_len * num, nbytes)
        self._stories.update()
        reasons, transfer = judge.moved(samples, input_len, mode, self._kv, self._stories, told)
        self._refuse(reasons, what)
        moved = transfer.get("moved_bytes")
        return samples, None if moved is None else int(moved)

    def check_engines(self) -> None:
        """Over all that was asked: a stumble of a modelled engine weighs much in the time of one request."""
        told = self._engines.since(self._before, 0)
        self._refuse(judge.engines(told, time.monotonic() - self._begun))

    def add_hooks(self, samples: Iterable[Sample]) -> None:
        """When the deployment has ended: engines tell of their last hooks late."""
        self._stories.update()
        for sample in samples:
            if transfer := self._stories.transfers.get(sample.transfer_id):
                sample.hooks_ms = transfer.hooks_ms

    def _refuse(self, reasons: Sequence[judge.Reason], what: str = "") -> None:
        if reasons:
            hint = f"logs: {self._deployment.state_dir.logs}"
            raise VoidRun(f"{self._label}{what}: {reasons[0].text}", hint=hint)
