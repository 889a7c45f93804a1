"""What runs, written to `state.json` of the state folder: the launcher writes it, `status` and `down` read it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.auth import make_key_file
from kvferry.errors import ConfigError
from kvferry.launch.process import ManagedProcess

Phase = Literal["starting", "ready", "stopping"]


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """`started` with `pid` names one process for good; `marker` finds its descendants."""

    name: str
    role: str
    pid: int
    started: float
    marker: str
    url: str
    log: str
    side_channel: str = ""


def process_state(process: ManagedProcess, role: str, url: str, side_channel: str = "") -> ProcessState:
    return ProcessState(
        name=process.name,
        role=role,
        pid=process.pid,
        started=process.tree.started,
        marker=process.tree.marker,
        url=url,
        log=str(process.log),
        side_channel=side_channel,
    )


class State(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase
    mode: str
    model: str
    url: str
    launcher_pid: int
    launcher_started: float
    story_dir: str
    auth_key_file: str = ""
    processes: tuple[ProcessState, ...] = ()


class StateDir:
    """The folder of one deployment: state.json, launcher.lock, launcher.log, auth.key, logs/, story/."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.state = self.path / "state.json"
        self.launcher_log = self.path / "launcher.log"
        self.logs = self.path / "logs"
        self.story = self.path / "story"
        self.auth_key = self.path / "auth.key"
        self._lock = -1

    def acquire(self) -> None:
        """Take the folder for this launcher's life. ConfigError if another one has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + 1.0  # `down` and `status` try the lock for a moment
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
            os.close(lock)
            there = self.read()
            what = f"{there.mode} at {there.url}" if there else "another launcher"
            raise ConfigError(
                f"state folder {self.path} is in use by {what}", hint="`kvferry down` first, or another --state-dir"
            ) from None
        self._lock = lock

    def locked(self) -> bool:
        """Whether a launcher holds the folder now."""
        try:
            lock = os.open(self.path / "launcher.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(lock)

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write(self, state: State) -> None:
        """Whole or not at all: a reader never sees half a file."""
        temporary = self.state.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        temporary.replace(self.state)

    def read(self) -> State | None:
        """None if nothing was started from here, or the file is none of ours."""
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=State)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.state} is damaged: {error}", hint="remove it") from None

    def remove(self) -> None:
        self.state.unlink(missing_ok=True)

    def clear_run(self) -> None:
        """Remove the logs and stories of the run before; a new run has a new key."""
        for path in [*self.logs.glob("*.log"), *self.story.glob("*.jsonl")]:
            path.unlink(missing_ok=True)
        self.logs.mkdir(exist_ok=True)
        self.story.mkdir(exist_ok=True)
        make_key_file(self.auth_key)


def default_state_dir() -> Path:
    """`$KVFERRY_STATE_DIR`, else `.kvferry` in the working directory."""
    return Path(os.environ.get("KVFERRY_STATE_DIR") or ".kvferry")
