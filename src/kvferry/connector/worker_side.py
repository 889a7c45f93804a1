"""A worker's half of the connector: hands the step's commands to the transfer thread and its results to the engine.

Thread: the worker's main thread only. The transfer thread (`transfer/thread.py`) does everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvferry.config import ConnectorConfig
from kvferry.connector.blocks import Caches, expand
from kvferry.connector.hooks import take_ms, timed
from kvferry.connector.metadata import StepMetadata
from kvferry.protocol.plan import regions_per_block
from kvferry.story import Story
from kvferry.transfer.areas import Areas
from kvferry.transfer.commands import Failing, Grown, Moment, Ready, Received, Result, Rewound, Sent
from kvferry.transfer.core import TransferCore
from kvferry.transfer.fabric import MakeFabric
from kvferry.transfer.peers import Identity
from kvferry.transfer.prober import Prober
from kvferry.transfer.stats import TransferStats
from kvferry.transfer.thread import InlineTransfers, Transfers, TransferThread

if TYPE_CHECKING:
    from kvferry.transfer.channel import ZmqChannel

log = logging.getLogger("kvferry.connector")

_FIRST_IDLE_WAIT_S = 0.001
_PREFILL_IDLE_MS = 5.0  # on P a new prompt may come while an old one is fetched, and every millisecond is TTFT
_MOST_PARTS = 8  # of one step, each of which costs the engine thread some microseconds
_NO_RESULTS: tuple[set[str], set[str], set[str]] = (set(), set(), set())  # shared, never changed


class WorkerSide:
    """The side channel is bound before this is made; the transfer thread starts with `start`."""

    def __init__(self, config: ConnectorConfig, identity: Identity, channel: ZmqChannel, story: Story) -> None:
        self.config, self.identity = config, identity
        self.hook_s = self.told_hook_s = 0.0
        self._channel, self._story = channel, story
        self._transfers: Transfers | None = None
        self._ratio = 1
        self._step = StepMetadata()
        self._handed = False  # this step's post-forward part is done
        self._parts_begun = False  # some of this step's parts have gone out
        self._marks: deque[int] = deque()  # planes after which this step's parts go out
        self._block_bytes = 0  # of one scheduler block in this rank
        self._num_planes = 0
        self._plane_of: Mapping[str, int] = {}
        self._saved: set[int] = set()  # planes of this step
        self._reportable: set[str] = set()  # requests whose Received the engine waits for
        self._results: list[Result] = []
        self._idle_wait_s = _FIRST_IDLE_WAIT_S
        longest_ms = config.idle_wait_ms if identity.role == "consumer" else min(config.idle_wait_ms, _PREFILL_IDLE_MS)
        self._longest_idle_s = longest_ms / 1e3
        self._areas: Areas | None = None  # kept alive: peers access it
        self._on_device = False

    def start(self, caches: Caches, make_fabric: MakeFabric | None = None) -> None:
        """KV memory exists: register it, make the agent, start the thread. Raises `FabricError`.

        `make_fabric`: what makes this rank's fabric, and its probes'; None: NIXL, as configured.
        """
        from kvferry.transfer.nixl import NixlFabric

        layout = caches.layout
        make = make_fabric or functools.partial(
            NixlFabric, backends=self.config.backends, num_threads=self.config.num_threads
        )
        self._ratio = caches.ratio
        self._num_planes, self._plane_of = len(layout.planes), caches.plane_of
        plane_bytes = sum(plane.token_bytes for plane in layout.planes)
        self._block_bytes = plane_bytes * layout.heads * layout.block_size * caches.ratio
        self._on_device = layout.device != "cpu"
        areas = self._areas = Areas(layout.device, self.config.staging_area_bytes)
        fabric = make(self.identity.engine_id)
        name = f"{self.identity.engine_id} rank {self.identity.rank}"
        channel = self._channel
        prober = Prober(name, make, layout.device, channel.host, channel.port, channel.wake, channel.key)
        fabric.register([*caches.regions, *areas.regions], layout.device)

        def make_core(deliver: Callable[[Result], None]) -> TransferCore:
            return TransferCore(
                self.identity, self.config, fabric, channel, layout, areas, self._story, deliver, prober=prober
            )

        self._transfers = TransferThread(make_core) if self.config.background else InlineTransfers(make_core)
        log.info(
            "%s rank %d: side channel %s:%d, %s, mode %s, %d planes of %d blocks of %d tokens, a lone block is %d "
            "regions, %.0f MiB registered",
            self.identity.engine_id,
            self.identity.rank,
            channel.host,
            channel.port,
            channel.key or "no key: loopback only",
            self.config.mode,
            len(layout.planes),
            layout.num_blocks,
            layout.block_size,
            regions_per_block(layout),
            sum(size for _, size in caches.regions) / 2**20,
        )

    # -- each step, in this order -----------------------------------------------------------------------------------

    @timed
    def fence(self, step: StepMetadata) -> None:
        """Before anything of the step runs: blocks of preempted sources must not be read any more."""
        if not step.fences or self._transfers is None:
            return
        waiting = {fence.request for fence in step.fences}
        for fence in step.fences:
            self._transfers.submit(fence)
        deadline = time.monotonic() + self.config.transfer_timeout_s
        while waiting and time.monotonic() < deadline:
            self._transfers.wait(0.05)
            new = self._transfers.results()
            self._results += new
            waiting -= {result.request for result in new}

    def bind(self, step: StepMetadata) -> None:
        """Before the forward: what needs no KV of this step leaves now."""
        self._step, self._handed = step, not (step.readies or step.grown)
        if step.news and self._transfers is not None:
            self._hand_on(self._transfers, step)
        self._marks.clear()
        self._saved.clear()
        if step.parts and self._transfers is not None:
            self._plan_parts(self._transfers, step)

    @timed
    def _hand_on(self, transfers: Transfers, step: StepMetadata) -> None:
        for expect in step.expects:
            transfers.submit(expect)
        for wait in step.waits:
            transfers.submit(wait)
        for land in step.lands:
            if land.end_token > land.start_token:
                self._reportable.add(land.request)
            transfers.submit(dataclasses.replace(land, block_ids=expand(land.block_ids, self._ratio)))
        for reject in step.rejects:
            self._reportable.add(reject.request)
            self._story.note(reject.transfer_id, "failed", code=reject.code, reason=reject.reason)
            log.error("%s: request %s: %s", self.identity.engine_id, reject.request, reject.reason)
            self._results.append(Received(reject.request, reject.transfer_id, False, reject.code, reject.reason))  # type: ignore[arg-type]
        for drop in step.drops:
            transfers.submit(drop)
        for abort in step.aborts:
            transfers.submit(abort)
        for ready in step.finished:
            transfers.submit(dataclasses.replace(ready, block_ids=expand(ready.block_ids, self._ratio)))

    @timed
    def _plan_parts(self, transfers: Transfers, step: StepMetadata) -> None:
        nbytes = self._block_bytes * sum(len(part.block_ids) for part in step.parts)
        pieces = transfers.pieces(nbytes, min(self._num_planes, _MOST_PARTS))
        self._marks.extend(self._num_planes * piece // pieces for piece in range(1, pieces))
        self._parts_begun = False

    @property
    def next_mark(self) -> int:
        """How many planes must be done for `planes_done` to have something to do; 0: nothing in this step."""
        return self._marks[0] if self._marks else 0

    def layer_done(self, name: str) -> None:
        """vLLM saved this layer's KV; layers come in any order, planes go out in theirs."""
        plane = self._plane_of.get(name)
        if plane is None:
            return
        self._saved.add(plane)
        mark = self.next_mark
        if len(self._saved) >= mark and all(index in self._saved for index in range(mark)):
            self.planes_done(mark)

    @timed
    def planes_done(self, planes: int) -> None:
        """The first `planes` planes of this step were launched (CUDA) or are done (CPU)."""
        if not self._marks or planes < self._marks[0] or self._transfers is None:
            return
        first, self._parts_begun = not self._parts_begun, True
        while self._marks and self._marks[0] <= planes:
            self._marks.popleft()
        moment = self._moment()
        for part in self._step.parts:
            block_ids = expand(part.block_ids, self._ratio) if first else ()
            self._transfers.submit(dataclasses.replace(part, block_ids=block_ids, planes=planes, moment=moment))

    def _moment(self) -> Moment | None:
        """Now, in the device's work."""
        if not self._on_device:
            return None
        import torch

        moment: Moment = torch.cuda.Event()
        moment.record(torch.cuda.current_stream())  # type: ignore[attr-defined]
        return moment

    def forward_done(self) -> None:
        """After the forward was launched (CUDA) or done (CPU). Idempotent within a step."""
        if not self._handed and self._transfers is not None:
            self._hand_over(self._transfers)

    @timed
    def _hand_over(self, transfers: Transfers) -> None:
        self._handed = True
        self._marks.clear()
        moment = self._moment()
        news: list[Grown | Ready] = [*self._step.grown, *self._step.readies]
        for computed in news:
            block_ids = expand(computed.block_ids, self._ratio)
            transfers.submit(dataclasses.replace(computed, block_ids=block_ids, moment=moment))

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """(finished_sending, finished_recving, failed_recving): request ids, each reported once.

        An idle step sleeps here until a result comes, so that the engine doesn't step a thousand times a second;
        longer and longer, so that a request that comes meanwhile waits little.
        """
        self.forward_done()
        if self._transfers is None:
            return _NO_RESULTS
        step = self._step
        if step.idle and not self._results:
            self._transfers.wait(self._idle_wait_s)
            self._idle_wait_s = min(2 * self._idle_wait_s, self._longest_idle_s)
        nothing = not self._results and not self._transfers.pending()
        if not step.idle or step.news or not nothing:
            self._idle_wait_s = _FIRST_IDLE_WAIT_S
        return _NO_RESULTS if nothing else self._take()

    @timed
    def _take(self) -> tuple[set[str], set[str], set[str]]:
        assert self._transfers is not None
        results, self._results = self._results + self._transfers.results(), []
        sent: set[str] = set()
        received: set[str] = set()
        failed: set[str] = set()
        for result in results:
            if isinstance(result, Rewound):
                continue  # `fence` waited for it
            if isinstance(result, Sent):
                if result.request:
                    sent.add(result.request)
            elif result.request not in self._reportable:
                continue
            elif isinstance(result, Failing):
                failed.add(result.request)  # the client hears of it now; the blocks stay until it is received
            else:
                self._reportable.discard(result.request)
                received.add(result.request)
                if not result.ok:
                    failed.add(result.request)
            if self._story.on:
                self._story.note(result.transfer_id, "hooks", part="worker", ms=take_ms(self))
        return sent, received, failed

    def stats(self) -> TransferStats | None:
        """What this rank's transfers did since the last call, if anything; after `results`."""
        return None if self._transfers is None else self._transfers.stats()

    def close(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        else:
            self._channel.close()
