"""All ranks of one engine behind one call: in the engine's own thread where there is one, else a process each."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvferry.engine.config import EngineConfig
from kvferry.engine.content import mix
from kvferry.engine.rank import Done, Rank, Work
from kvferry.errors import KVFerryError

_MASK = (1 << 64) - 1
_START_S = 60.0


class RankDied(KVFerryError):
    code = "rank_died"


class Ranks(Protocol):
    def step(self, work: Work) -> list[Done]:
        """What each rank says, in order. Raises `RankDied`, or what a rank raised."""

    def inject(self, fault: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_ranks(config: EngineConfig) -> Ranks:
    """Raises `KVFerryError`."""
    return OneRank(config) if config.tp == 1 else RankProcesses(config)


class OneRank:
    def __init__(self, config: EngineConfig) -> None:
        self._rank = Rank(config, 0)

    def step(self, work: Work) -> list[Done]:
        return [self._rank.step(work)]

    def inject(self, fault: Mapping[str, Any]) -> None:
        self._rank.inject(fault)

    def close(self) -> None:
        self._rank.close()


class RankProcesses:
    """One pipe each. A rank ends when its pipe does, so none outlives the engine."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(config.tp):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(theirs, config, rank), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            for rank in range(config.tp):
                self._answer(rank, _START_S)
        except BaseException:
            self.close()
            raise

    def step(self, work: Work) -> list[Done]:
        return self._ask(("step", work))

    def inject(self, fault: Mapping[str, Any]) -> None:
        self._ask(("inject", dict(fault)))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, question: tuple[str, Any]) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(question)
            except OSError:
                raise self._died(rank) from None
        return [self._answer(rank, None) for rank in range(len(self._pipes))]

    def _answer(self, rank: int, timeout_s: float | None) -> Any:
        try:
            if not self._pipes[rank].poll(timeout_s):
                raise RankDied(f"rank {rank} did not start within {timeout_s:g} s")
            answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise self._died(rank) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _died(self, rank: int) -> RankDied:
        process = self._processes[rank]
        process.join(1.0)
        return RankDied(f"rank {rank} ended with exit code {process.exitcode}")


def serve_rank(pipe: Connection, config: EngineConfig, number: int) -> None:
    """The main loop of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine ends us by the pipe
    rank: Rank | None = None
    try:
        try:
            rank = Rank(config, number)
            pipe.send(None)
            while True:
                kind, what = pipe.recv()
                try:
                    if kind == "step":
                        pipe.send(rank.step(what))
                    else:
                        rank.inject(what)
                        pipe.send(None)
                except KVFerryError as error:
                    pipe.send(error)
        except KVFerryError as error:
            pipe.send(error)
    except (EOFError, BrokenPipeError):
        return
    finally:
        if rank is not None:
            rank.close()


def combined(answers: list[Done], replicas: int) -> dict[str, int]:
    """The ranks' sums as one per request. `replicas`: neighbouring ranks that hold the same heads; any difference
    between them changes the result."""
    if len(answers) == 1:
        return answers[0].totals
    found = {}
    for who in answers[0].totals:
        total = 0
        for first in range(0, len(answers), replicas):
            base = answers[first].totals[who]
            total += base
            for extra in range(1, replicas):
                total += (answers[first + extra].totals[who] - base) * (mix(first + extra) | 1)
        found[who] = total & _MASK
    return found
