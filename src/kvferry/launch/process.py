"""One process that the launcher owns: started under the watchdog, logged to a file, ended with its whole tree."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.errors import LaunchError
from kvferry.launch.guard import Guard
from kvferry.launch.tree import MARKER, Tree, alive, members, note_shm, start_time

# The child waits for a line on its stdin, which comes once the watchdog knows it; if the launcher dies before that,
# the child reads end-of-file and exits. Signal dispositions and the rest of the environment are left as they are.
_WAIT_FOR_GO = 'read -r go || exit 125; exec "$@" </dev/null'
_CAUSE = re.compile(r"(?:^|\s)((?:[\w.]*\.)?\w*(?:Error|Exception)(?:: .+|$))")
_USAGE = re.compile(r"(?:^|\s)([\w./-]+: error: .+)")
_OURS = re.compile(r"^kvferry: error: (.+)")


class ProcessDied(LaunchError):
    """A process ended that should run. `tail`: the last lines of its log."""

    def __init__(self, message: str, *, hint: str = "", tail: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.tail = tuple(tail)


class ManagedProcess:
    """Owned by the thread that owns the deployment; `start` may be called again after the process ended."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, guard: Guard) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.env = dict(env)
        self.log = log
        self.tree = Tree(0, 0.0, "")
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    @property
    def pid(self) -> int:
        return self.tree.pid

    def pids(self) -> list[int]:
        """Of all its processes, itself first."""
        return [process.pid for process in members([self.tree])]

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        marker = secrets.token_hex(8)
        with self.log.open("ab") as out:
            self._log_from = out.tell()
            process = subprocess.Popen(
                ["/bin/sh", "-c", _WAIT_FOR_GO, "sh", *self.argv],
                env={**self.env, MARKER: marker},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = process
        self.tree = Tree(process.pid, start_time(process.pid), marker)
        self._guard.watch(self.tree)
        assert process.stdin is not None
        try:
            process.stdin.write(b"go\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # killed already: `poll` tells

    def poll(self) -> int | None:
        """The exit code (negative: the signal), None while it runs. Reaps."""
        return None if self._process is None else self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """`poll`, after at most so long; for a process that was asked to end."""
        try:
            return None if self._process is None else self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def running(self) -> bool:
        return self._process is not None and self.poll() is None and alive(self.pid, self.tree.started)

    def note_shm(self) -> None:
        """Remember the shared memory it holds now, here and in the watchdog."""
        note_shm([self.tree])
        self._guard.note_shm(self.tree)

    def signal(self, number: int) -> None:
        """Send a signal to the leader only, as a user's `kill` would."""
        if self.running():
            self.note_shm()
            os.kill(self.pid, number)

    def ended(self) -> None:
        """To be called once the tree is gone."""
        self._guard.forget(self.tree)

    def lines(self, count: int = 25) -> list[str]:
        """The last lines that this life of the process wrote."""
        try:
            with self.log.open("rb") as source:
                source.seek(max(self._log_from, source.seek(0, os.SEEK_END) - 400_000))
                text = source.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip()[:400] for line in text.splitlines() if line.strip()][-count:]

    def cause(self) -> str:
        """The first line of the log that is our own error or names an exception: what came after is mostly its echo.
        Where there is none, argparse's last word.
        """
        usage = ""
        for line in self.lines(4000):
            found = _OURS.search(line) or _CAUSE.search(line)
            if found and "Traceback" not in line:
                return found[1].strip()[:300]
            wrong = _USAGE.search(line)
            usage = wrong[1].strip()[:300] if wrong else usage
        return usage

    def died(self, when: str) -> ProcessDied:
        """The error that says that it ended, and how."""
        code = None if self._process is None else self._process.wait(5.0)  # dead, perhaps not yet reaped
        cause = self.cause()
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        message = f"{self.name} {how} {when}" + (f": {cause}" if cause else "")
        return ProcessDied(message, hint=f"its log: {self.log}", tail=self.lines())
