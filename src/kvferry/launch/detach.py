"""`kvferry up --detach`: the same command without `--detach`, in a session of its own, writing to launcher.log.

The waiting parent holds a pipe to it; if the parent goes away before 'ready', the child stops everything. From
'ready' on the child is on its own and `kvferry down` stops it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from kvferry.launch.cancel import Cancel
from kvferry.launch.state import StateDir

PARENT_FD = "KVFERRY_PARENT_FD"
STOP_WITHIN_S = 60.0


def parent_pipe() -> int:
    """In the child: the pipe that closes with the waiting parent; -1 when not detached."""
    number = os.environ.pop(PARENT_FD, "")
    if not number:
        return -1
    os.set_inheritable(int(number), False)
    return int(number)


def launch(folder: StateDir, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Start the child, pass its progress on, return 0 once it is ready, or its exit code if it ends before."""
    cancel = Cancel()
    cancel.catch_signals()
    folder.acquire()  # refuses here, and once more in the child, if somebody else runs
    folder.release()
    read, write = os.pipe2(os.O_CLOEXEC)
    argv = [sys.executable, "-m", "kvferry.cli", *(arg for arg in arguments if arg != "--detach")]
    with folder.launcher_log.open("wb") as out:
        child = subprocess.Popen(
            argv,
            env={**os.environ, PARENT_FD: str(read)},
            pass_fds=[read],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    os.close(read)
    told = 0
    try:
        while True:
            ended = child.poll() is not None
            lines, told = _new_lines(folder, told)
            for line in lines:
                if line.startswith("ready http"):
                    print(line, flush=True)
                    return 0
                say(line)
            if ended:
                return child.returncode or 1
            if cancel.wait(0.1):
                os.close(write)
                write = -1
                child.wait(STOP_WITHIN_S)
                say("stopped")
                return 130
    finally:
        if write >= 0:
            os.close(write)


def _new_lines(folder: StateDir, offset: int) -> tuple[list[str], int]:
    with folder.launcher_log.open("rb") as log:
        log.seek(offset)
        data = log.read()
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), offset + len(whole)
