"""Process trees: who belongs to one, what it holds in shared memory, how it is ended.

A tree is everything that started from one leader, which was started in a session of its own with a marker in its
environment. A process belongs to it if it is in that session or carries that marker: so a child whose parent died,
and one that made a session of its own, are found too. (vLLM's processes rename themselves, which overwrites what can
be read of their environment; they stay in the session.) Standard library and psutil only: the watchdog imports this.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARKER = "KVFERRY_TREE"
SHM = Path("/dev/shm")


@dataclass
class Tree:
    """One tree by its leader's pid (also its session id), the leader's start time, and its marker."""

    pid: int
    started: float
    marker: str
    shm: set[str] = field(default_factory=set)


def start_time(pid: int) -> float:
    """The start time of a live process, 0.0 if there is none. With the pid it names one process for good."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def alive(pid: int, started: float) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _marked(pid: int, needles: dict[bytes, Tree]) -> bool:
    if not needles:
        return False
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry in needles for entry in environ.split(b"\0"))


def members(trees: Iterable[Tree]) -> list[psutil.Process]:
    """The live processes of these trees. Zombies are left out: they hold nothing."""
    trees = list(trees)
    # A session id is its leader's pid, and a pid is not reused while a session of that id lives; but after the whole
    # session is gone it may be, so a leader that is a different process now rules the session out.
    sessions = {tree.pid for tree in trees if start_time(tree.pid) == 0.0 or alive(tree.pid, tree.started)}
    needles = {f"{MARKER}={tree.marker}".encode(): tree for tree in trees if tree.marker}
    earliest = min((tree.started for tree in trees), default=0.0) - 1.0
    found = []
    for process in psutil.process_iter():
        try:
            if process.create_time() < earliest or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) in sessions or _marked(process.pid, needles):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def shm_files(pids: Iterable[int]) -> set[str]:
    """Paths in /dev/shm that these processes map or hold open."""
    found: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            maps = ""
        found.update(line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line)
        try:
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            links = []
        found.update(link for link in links if link.startswith("/dev/shm/"))
    return {path for path in found if not path.endswith(" (deleted)")}


def note_shm(trees: Iterable[Tree]) -> None:
    """Remember the shared memory that the trees hold now, so that it can be removed when they are gone."""
    for tree in trees:
        tree.shm |= shm_files(process.pid for process in members([tree]))


def remove_shm(trees: Iterable[Tree]) -> list[str]:
    """Remove the remembered files that nobody uses any more; returns those removed."""
    wanted = {path for tree in trees for path in tree.shm if os.path.exists(path)}
    if wanted:
        wanted -= shm_files(psutil.pids())
    removed = []
    for path in sorted(wanted):
        try:
            os.unlink(path)
            removed.append(path)
        except OSError:
            continue
    return removed


def _is_tracker(process: psutil.Process) -> bool:
    """Python's resource tracker: ends by itself after its clients, removing what they left in /dev/shm."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _is_worker(process: psutil.Process) -> bool:
    return not _is_tracker(process)


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except (psutil.Error, OSError):
            continue


def _wait_gone(
    trees: list[Tree], until: float, reap: Callable[[], object], pick: Callable[[psutil.Process], bool]
) -> bool:
    """Wait until no member that `pick` accepts is left; True if so by `until`."""
    pause = 0.01
    while True:
        reap()
        if not any(pick(process) for process in members(trees)):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)


def end_trees(
    trees: Iterable[Tree],
    *,
    grace: Callable[[], float] = lambda: 8.0,
    reap: Callable[[], object] = lambda: None,
) -> None:
    """End every process of these trees and remove their shared memory.

    Leaders get SIGTERM and `grace` seconds to close down in order (asked again and again: a second Ctrl-C shortens
    it). What a leader left behind gets SIGTERM and two seconds, what is left then SIGKILL. Resource trackers go last,
    for they clean up after the others.
    """
    trees = list(trees)
    note_shm(trees)
    leaders = {tree.pid for tree in trees}
    begun = time.monotonic()
    _send([process for process in members(trees) if process.pid in leaders], signal.SIGTERM)
    while not _wait_gone(trees, min(begun + grace(), time.monotonic() + 0.5), reap, lambda p: p.pid in leaders):
        if time.monotonic() >= begun + grace():
            break
    note_shm(trees)
    orphans = [process for process in members(trees) if process.pid not in leaders and _is_worker(process)]
    _send(orphans, signal.SIGTERM)
    _wait_gone(trees, time.monotonic() + min(2.0, grace()), reap, _is_worker)
    note_shm(trees)
    for _ in range(20):  # a member may have started another one meanwhile
        left = [process for process in members(trees) if _is_worker(process)]
        if not left:
            break
        _send(left, signal.SIGKILL)
        _wait_gone(trees, time.monotonic() + 1.0, reap, _is_worker)
    if not _wait_gone(trees, time.monotonic() + 2.0, reap, lambda process: True):
        _send(members(trees), signal.SIGKILL)
        _wait_gone(trees, time.monotonic() + 2.0, reap, lambda process: True)
    remove_shm(trees)
