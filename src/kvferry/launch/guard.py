"""The watchdog: ends everything a launcher started when that launcher dies without doing so (SIGKILL, a crash).

One small process per deployment, in a session of its own, deaf to Ctrl-C. The launcher tells it over a pipe, one line
of JSON each, what to watch; when the pipe closes, it ends what is still watched, removes the named files and exits.
A pipe closes with its process however that ends, which a signal handler or an exit hook cannot promise.
PR_SET_PDEATHSIG was not taken: it reaches only the direct child, and fires when the *thread* that forked ends.

No process escapes between its start and the watchdog hearing of it: a child first waits for a line on its stdin, and
exits if that closes (see process.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import IO, Any

from kvferry.launch.tree import Tree, end_trees


class Guard:
    """The launcher's end of the pipe. Used by the thread that owns the deployment."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.launch.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def _tell(self, **message: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except (BrokenPipeError, ValueError):
            pass  # the watchdog was killed: the launcher still stops everything itself

    def watch(self, tree: Tree) -> None:
        self._tell(watch=tree.pid, started=tree.started, marker=tree.marker)

    def note_shm(self, tree: Tree) -> None:
        if tree.shm:
            self._tell(shm=sorted(tree.shm), of=tree.pid)

    def forget(self, tree: Tree) -> None:
        self._tell(forget=tree.pid)

    def remove_later(self, path: str) -> None:
        """A file or folder to remove when the launcher is gone."""
        self._tell(remove=path)

    def close(self) -> None:
        """Close the pipe and wait for the watchdog to end what is still watched."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
        except OSError:
            pass
        self._process.wait()


def main(source: IO[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trees: dict[int, Tree] = {}
    paths: list[str] = []
    for line in source:
        try:
            message = json.loads(line)
        except ValueError:
            break  # half a line: the launcher died while writing it
        if "watch" in message:
            trees[message["watch"]] = Tree(message["watch"], message["started"], message["marker"])
        elif "shm" in message and message["of"] in trees:
            trees[message["of"]].shm.update(message["shm"])
        elif "forget" in message:
            trees.pop(message["forget"], None)
        elif "remove" in message:
            paths.append(message["remove"])
    if trees:
        end_trees(trees.values(), grace=lambda: 2.0)
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            os.unlink(path)


if __name__ == "__main__":
    main(sys.stdin.buffer)
