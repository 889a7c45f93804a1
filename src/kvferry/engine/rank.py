"""One tensor-parallel rank: its KV memory, its half of the connector, and a step that takes as long as the model would.

Thread: one, the engine's (tp 1) or the main one of the rank's own process. The connector's transfer thread works beside
it, as in vLLM's workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.auth import load_key
from kvferry.config import connector_config
from kvferry.engine.config import EngineConfig
from kvferry.engine.content import U64
from kvferry.engine.faults import Faults, FaultyChannel, FaultyStory, MakeFabric, damage
from kvferry.engine.memory import KvMemory
from kvferry.ids import EngineId
from kvferry.story import story_side

if TYPE_CHECKING:
    from kvferry.connector.metadata import StepMetadata
    from kvferry.connector.worker_side import WorkerSide
    from kvferry.transfer.stats import TransferStats

_MASK = (1 << 64) - 1


@dataclass
class Work:
    """What the scheduler asks of every rank in one step. All of it can be pickled.

    `prompts`: (request, first position, prefix values (N,), whether the next token is wanted) of requests with several
    tokens in this step or one that isn't wanted. `decodes`: (request, position, prefix value) of those with just one.
    `model_s`: how long the model would take; 0 without model work. `spent_s`: how much of that the engine's own
    planning has used up (a model's measured step times hold its engine's).
    """

    new_blocks: dict[str, list[int]]
    fresh: set[str]
    ended: list[str]
    prompts: list[tuple[str, int, U64, bool]] = field(default_factory=list)
    decodes: list[tuple[str, int, int]] = field(default_factory=list)
    model_s: float = 0.0
    spent_s: float = 0.0
    metadata: StepMetadata | None = None


@dataclass
class Done:
    """A rank's answer. `totals`: sum over all KV of a request, by `content`. `late_s`: real work beyond `model_s`.
    `transfers`: what they did since the last step, if anything."""

    totals: dict[str, int]
    sent: set[str]
    received: set[str]
    failed: set[str]
    late_s: float
    transfers: TransferStats | None = None


class _Sequence:
    """A request's blocks, and what each held when it was read last (heads are summed up)."""

    __slots__ = ("blocks", "known", "sums", "total", "turn")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.sums: list[int] = []
        self.total = 0
        self.known = 0  # blocks that were read at least once
        self.turn = 0  # next block to read again


class Rank:
    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.config, self.rank = config, rank
        self.faults = Faults()
        heads = config.heads_of(rank)
        shape = (config.profile.shape.layers, config.num_blocks, heads, config.block_size, config.cell_bytes)
        if config.device == "cpu":
            self._memory = KvMemory(*shape)
        else:
            from kvferry.engine.torch_memory import TorchMemory

            self._memory = TorchMemory(*shape, device=device_of(config.device, rank))
        self._sequences: dict[str, _Sequence] = {}
        self._worker: WorkerSide | None = None
        if config.kv_transfer is not None:
            self._worker = self._connect(config.kv_transfer)

    def _connect(self, transfer: Mapping[str, Any]) -> WorkerSide:
        """Raises `KVFerryError`: a side channel that is taken, no NIXL, bad settings."""
        from kvferry.connector.worker_side import WorkerSide
        from kvferry.transfer.peers import Identity

        settings = connector_config(transfer.get("kv_connector_extra_config") or {})
        role, config = str(transfer["kv_role"]), self.config
        story = FaultyStory(self.faults, settings.story_dir or None, story_side(role), self.rank)
        host, port = settings.side_channel_host, settings.side_channel_port + self.rank
        channel = FaultyChannel(self.faults, host, port, load_key(settings.auth_key_file))
        identity = Identity(EngineId(transfer["engine_id"]), self.rank, config.tp, role.removeprefix("kv_"))
        worker = WorkerSide(settings, identity, channel, story)
        make_fabric = MakeFabric(self.faults, settings.backends, settings.num_threads)
        try:
            caches = self._memory.caches(config.profile.shape.kv_heads, config.fingerprint())
            worker.start(caches, make_fabric)
        except BaseException:
            worker.close()
            raise
        return worker

    def step(self, work: Work) -> Done:
        metadata = work.metadata
        self.faults.freeze()
        if self._worker is not None and metadata is not None:
            self._worker.fence(metadata)
            self._worker.bind(metadata)
        begun = time.monotonic() - work.spent_s
        self._tables(work)
        totals = self._forward(work) if work.prompts or work.decodes else {}
        worked = time.monotonic() - begun
        if worked < work.model_s:
            self._sleep(begun, work.model_s)
        late_s = max(0.0, worked - work.model_s) if work.model_s else 0.0
        if self._worker is None or metadata is None:
            return Done(totals, set(), set(), set(), late_s)
        self._worker.forward_done()
        sent, received, failed = self._worker.results()
        if received and self.faults.corrupt is not None:
            self._corrupt(received - failed)
        return Done(totals, set(sent), set(received), set(failed), late_s, self._worker.stats())

    def _sleep(self, begun: float, model_s: float) -> None:
        """Until the modelled step is over; its layers are done one after the other, in equal times."""
        layers = self.config.profile.shape.layers
        while self._worker is not None and (mark := self._worker.next_mark):
            _until(begun + model_s * mark / layers)
            self._worker.planes_done(mark)
        _until(begun + model_s)

    def _tables(self, work: Work) -> None:
        for request_id in work.ended:
            self._sequences.pop(request_id, None)
        for request_id, blocks in work.new_blocks.items():
            if request_id in work.fresh:
                self._sequences[request_id] = _Sequence()
            self._sequences[request_id].blocks += blocks

    # -- the model's work -------------------------------------------------------------------------------------------

    def _forward(self, work: Work) -> dict[str, int]:
        size = self.config.block_size
        if work.decodes:
            blocks = _ints([self._sequences[who].blocks[at // size] for who, at, _ in work.decodes])
            values: U64 = np.array([value for _, _, value in work.decodes], dtype=np.uint64)
            self._memory.write_one_each(blocks, _ints([at for _, at, _ in work.decodes]), values)
        for who, start, prefix, _ in work.prompts:
            self._memory.write(_ints(self._sequences[who].blocks), start, prefix)
        ends = [(who, at + 1) for who, at, _ in work.decodes]
        ends += [(who, start + len(prefix)) for who, start, prefix, wanted in work.prompts if wanted]
        return self._read(ends) if ends else {}

    def _read(self, ends: list[tuple[str, int]]) -> dict[str, int]:
        """For each (request, tokens): the sum over its first `tokens` tokens, from memory.

        What was never read is read now; of the rest the last block, and one more in turn, so that whatever changes a
        block under a running request shows within one round.
        """
        size = self.config.block_size
        where: list[tuple[_Sequence, int, int]] = []
        for who, tokens in ends:
            sequence = self._sequences[who]
            last = (tokens - 1) // size
            full = tokens - last * size
            if sequence.known < last:
                where += [(sequence, index, size) for index in range(sequence.known, last)]
            elif last:
                turn = sequence.turn % last
                sequence.turn = turn + 1
                where.append((sequence, turn, size))
            where.append((sequence, last, full))
            sequence.known = last + 1
            missing = last + 1 - len(sequence.sums)
            if missing > 0:
                sequence.sums += [0] * missing
        ids = _ints([sequence.blocks[index] for sequence, index, _ in where])
        logical, lengths = _ints([index for _, index, _ in where]), _ints([length for _, _, length in where])
        found: list[int] = self._memory.sums(ids, logical, lengths).sum(axis=1, dtype=np.uint64).tolist()
        for (sequence, index, _), value in zip(where, found, strict=True):
            sequence.total += value - sequence.sums[index]
            sequence.sums[index] = value
        return {who: self._sequences[who].total & _MASK for who, _ in ends}

    # -- faults, end ------------------------------------------------------------------------------------------------

    def inject(self, fault: Mapping[str, Any]) -> None:
        """Raises `ConfigError`."""
        self.faults.set(fault, self._memory)

    def _corrupt(self, received: set[str]) -> None:
        fault = self.faults.corrupt
        if fault is not None and fault.when == "in_flight":
            return
        for who in received & self._sequences.keys():
            if fault is not None:
                blocks = self._sequences[who].blocks
                block = random.choice(blocks)
                damage(self._memory, fault, block, 1 if block == blocks[-1] else None)  # the last may be partly empty
                self.faults.corrupt = fault = None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def device_of(device: str, rank: int) -> str:
    """Rank r's device where the engine's is 'cuda:N': the one that is r further on."""
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first) + rank}"


def _until(then: float) -> None:
    time.sleep(max(0.0, then - time.monotonic()))


def _ints(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
