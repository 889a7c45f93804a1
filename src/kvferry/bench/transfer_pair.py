"""The two sides of `kvferry bench transfer`, as the process that compares them has them: started, asked, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Any

from kvferry.bench.transfer_records import LIMIT_S, Card, Raw, Setup
from kvferry.bench.transfer_shape import Order, Shape, pool_blocks
from kvferry.config import Staging
from kvferry.errors import LaunchError, TransferError, TransferTimeout
from kvferry.launch.engine import CPU_ENV
from kvferry.launch.ports import LOOPBACK
from kvferry.protocol.messages import Verify
from kvferry.transfer.fabric import Op

_FAREWELL_S = 5.0


def transports(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """UCX's settings: those of the environment, and the launcher's UCX_TLS where it has none."""
    return {"UCX_TLS": CPU_ENV["UCX_TLS"], **{name: text for name, text in environ.items() if name.startswith("UCX_")}}


class Child:
    """One side in its own process and session, so that Ctrl-C reaches only us. It ends when we do, however we do."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.bench.transfer_side", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **transports()},
            )
        self._pipe.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> None:
        try:
            self._pipe.send((name, arguments))
        except OSError:
            raise self._gone() from None

    def answer(self, limit_s: float = 1.5 * LIMIT_S) -> Any:
        """Raises `TransferError` with what the side says, or if it says nothing in time, and `LaunchError` if it has
        ended."""
        if not self._pipe.poll(limit_s):
            raise TransferTimeout(f"{self.name} side: no answer within {limit_s:g} s")
        try:
            kind, *rest = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if kind == "error":
            raise TransferError(f"{self.name} side: {rest[0]}", hint=rest[1])
        return rest[0]

    def ask(self, name: str, *arguments: Any) -> Any:
        self.call(name, *arguments)
        return self.answer()

    def close(self) -> None:
        """Let it end by itself. Raises like `answer`."""
        self.ask("close")
        self._process.wait(_FAREWELL_S)

    def kill(self) -> None:
        """Idempotent, and after `close` too."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _gone(self) -> LaunchError:
        try:
            code = self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            return LaunchError(f"{self.name} side: it closed its pipe")
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return LaunchError(f"{self.name} side: its process ended with {how}", hint="what it said is above, if anything")


class Pair:
    """Both sides, which know each other. A context: leaving it ends them, at once after an error."""

    def __init__(self, shape: Shape, layout: Order, blocks: int, staging: Staging, verify: Verify) -> None:
        self._children: list[Child] = []
        try:
            same = (shape, layout, pool_blocks(blocks), staging, verify)
            self.prefill, card = self._start("prefill", Setup("producer", *same))
            self.port = card.port
            peers = (f"{LOOPBACK}:{card.port}",)
            self.decode, other = self._start("decode", Setup("consumer", *same, peers))
            self.prefill.ask("meet", other)
            self.decode.ask("meet", card)
        except BaseException:
            self._kill()
            raise

    def _start(self, name: str, setup: Setup) -> tuple[Child, Card]:
        child = Child(name, setup)
        self._children.append(child)
        return child, child.answer()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for child in self._children:
                    child.close()
        finally:
            self._kill()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    # -- raw copies, the other side driving its agent ---------------------------------------------------------------

    def floor(self, nbytes: int) -> Raw:
        """One WRITE from the beginning of P's memory to that of D's."""
        return self._raw(self.prefill, self.decode, "floor", nbytes)

    def naive(self, op: Op, p_blocks: Sequence[int], d_blocks: Sequence[int], tokens: int) -> Raw:
        """P writes, or D reads."""
        sides = (self.prefill, self.decode) if op == "WRITE" else (self.decode, self.prefill)
        return self._raw(*sides, "naive", op, p_blocks, d_blocks, tokens)

    def _raw(self, actor: Child, target: Child, name: str, *arguments: Any) -> Raw:
        target.ask("drive")
        made: Raw = actor.ask(name, *arguments)
        target.ask("rest")
        return made
