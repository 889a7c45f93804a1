"""Probes of the way between two ranks: an engine's side of them.

A probe runs beside the engines, in one process per side (`transfer/probe.py`), with an agent and memory of its own: it
can take neither the transfer thread's time nor the engine down, and ends for certain. D's process speaks to P's rank
over P's side channel; P's rank starts a process of its own, which dials the same side channel, and hands on what the
two say to each other. One probe at a time per rank.

Threads: all methods belong to the transfer core's thread. Each process has a watcher thread, which starts it, sleeps
until it ends, leaves the outcome in `Child.outcome` and calls `wake`.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvferry.auth import AuthKey
from kvferry.protocol.messages import (
    Message,
    Probe,
    Probed,
    ProbeFailed,
    ProbeNext,
    ProbeReady,
    ProbeStep,
    ProbeTarget,
    ProbeTimes,
)
from kvferry.transfer.fabric import MakeFabric
from kvferry.transfer.probe import Job

log = logging.getLogger("kvferry.transfer")

_MOST_S = 120.0
_GRACE_S = 3.0  # a process ends itself at its limit; this much later it is killed
_FAREWELL_S = 2.0


class Child:
    """One process, started and watched by a thread of its own. `outcome` is None while it runs."""

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self.outcome: Probed | None = None
        self._job, self._wake = job, wake
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="kvferry-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill it; it ends soon."""
        with self._lock:
            self._unwanted = True
            if self._process is not None:
                self._process.kill()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        fds = [os.memfd_create(name) for name in ("output", "result", "ucx")]  # nothing is left of them, whoever dies
        try:
            self.outcome = self._run(*fds)
        except OSError as error:
            self.outcome = Probed(failure=f"the probe's process could not be started: {error}")
        finally:
            for fd in fds:
                os.close(fd)
        self._wake()

    def _run(self, output: int, result: int, ucx: int) -> Probed:
        with self._lock:
            if self._unwanted:
                return Probed(failure="nobody waits for the probe any more")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.transfer.probe", str(result), str(ucx)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(result, ucx),
                env=_environment(ucx),
            )
        try:
            self._process.communicate(msgspec.msgpack.encode(self._job), timeout=self._job.limit_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        try:
            return msgspec.msgpack.decode(_contents(result), type=Probed)
        except msgspec.DecodeError:
            pass  # it ended before it had written all of it
        said = _contents(output).decode(errors="replace").strip().splitlines()
        last = f": {said[-1].strip()[:300]}" if said else ""
        return Probed(failure=f"the probe's process ended with code {self._process.returncode}{last}")


def _contents(fd: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def _environment(ucx: int) -> dict[str, str]:
    """Ours, with UCX telling into that file which transport it takes. The factory must be found by its module."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_FILE": f"/proc/self/fd/{ucx}",
    }


@dataclass
class _Run:
    """The probe under way. `asked_by`: channel key of who gets the answer (on P: of D's half). `half`: of our half,
    on P, once it has spoken. `timed`: it has given its times; `over`: they have been had, and it ends by itself."""

    probe_id: str
    asked_by: str
    child: Child
    half: str = ""
    timed: bool = False
    over: bool = False


class Prober:
    """`host`, `port`, `key`: of this rank's side channel. `wake`: any thread may call it, it ends the core's sleep."""

    def __init__(
        self,
        name: str,
        make_fabric: MakeFabric,
        device: str,
        host: str,
        port: int,
        wake: Callable[[], None],
        key: AuthKey | None = None,
    ) -> None:
        self._key = key
        self._name, self._device, self._host, self._port = name, device, host, port
        self._make_fabric = make_fabric
        self._wake = wake
        self._run: _Run | None = None

    def take(self, key: str, message: Probe | ProbeStep) -> list[tuple[str, Message]]:
        """What to send to whom in answer to a message."""
        if isinstance(message, Probe):
            failure = self._start("", key, message.host, message.port, message)
            return [(key, Probed(failure=failure))] if failure else []
        if isinstance(message, ProbeTarget):
            failure = self._start(message.probe_id, key, self._host, self._port, message)
            return [(key, ProbeFailed(probe_id=message.probe_id, reason=failure))] if failure else []
        run = self._run
        if run is None or not run.probe_id or message.probe_id != run.probe_id:
            return []  # of a probe that is over
        if key == run.asked_by:
            run.over = run.timed and isinstance(message, ProbeNext)
            return [(run.half, message)] if run.half else []
        run.timed = isinstance(message, ProbeTimes)
        if isinstance(message, ProbeReady):
            run.half = key
        return [(run.asked_by, message)]

    def lost(self, key: str) -> None:
        """A connection is gone: a probe that nobody waits for is not gone on with."""
        if self._run is not None and key == self._run.asked_by and not self._run.over:
            self._run.child.stop()

    def ended(self) -> list[tuple[str, Message]]:
        """What to send to whom, since a process has ended."""
        run = self._run
        if run is None or run.child.outcome is None:
            return []
        self._run = None
        outcome = run.child.outcome
        if outcome.failure:
            log.warning("%s: probe: %s", self._name, outcome.failure)
        if not run.probe_id:
            return [(run.asked_by, outcome)]
        return [(run.asked_by, ProbeFailed(probe_id=run.probe_id, reason=outcome.failure))] if outcome.failure else []

    def close(self) -> None:
        if self._run is not None:
            self._run.child.stop()
            self._run.child.join(_FAREWELL_S)

    def _start(self, probe_id: str, asked_by: str, host: str, port: int, asked: Probe | ProbeTarget) -> str:
        """Why not; '' if it has begun."""
        if self._run is not None:
            return f"{self._name} has another probe under way: try again in a minute"
        try:
            factory = pickle.dumps(self._make_fabric)  # now: it may carry faults that are armed
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"{self._name} cannot make its fabric in another process: {error}"
        job = Job(
            name=self._name,
            factory=factory,
            device=self._device,
            host=host,
            port=port,
            sizes=asked.sizes,
            piece=asked.piece,
            limit_s=min(asked.limit_s, _MOST_S),
            target=asked if isinstance(asked, ProbeTarget) else None,
            key=self._key.text if self._key is not None else "",
        )
        if probe_id:
            log.info("%s: a decode engine's probe begins", self._name)
        else:
            log.info("%s: probe of the way to %s:%d begins", self._name, host, port)
        self._run = _Run(probe_id, asked_by, Child(job, self._wake))
        return ""
