"""Bearer keys that callers of the router must show: read from a file, compared in constant time, never told.

A key that is shown is looked up by its digest under a secret of this process, so how long that takes says nothing of
the keys that there are. The file is read again when it has changed: a key can be given or taken while requests run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable

from kvferry.auth import read_private
from kvferry.errors import ConfigError
from kvferry.router.replies import Refusal

log = logging.getLogger("kvferry.router")

LOOK_INTERVAL_S = 1.0
_MOST_BYTES = 16 * 1024 * 1024
RECIPE = "one key per line, # begins a comment; make one with `umask 077; openssl rand -hex 32 >> FILE`"


def read_keys(path: str, option: str, least: int = 1) -> tuple[str, ...]:
    """The keys in a file, without blank lines and comments, each of `least` characters or more.

    Raises `ConfigError` that tells no key.
    """
    raw = read_private(path, option, _MOST_BYTES, RECIPE, "new keys")
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{option}: {path} is above {_MOST_BYTES} bytes", hint=RECIPE)
    try:
        lines = [line.partition("#")[0].strip() for line in raw.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{option}: {path} is no text", hint=RECIPE) from None
    for number, line in enumerate(lines, 1):
        if line and not (line.isascii() and line.isprintable() and " " not in line):
            raise ConfigError(f"{option}: {path}: line {number} is no key (ASCII, without spaces)", hint=RECIPE)
        if line and len(line) < least:
            raise ConfigError(f"{option}: {path}: the key in line {number} is shorter than {least}", hint=RECIPE)
    keys = tuple(line for line in lines if line)
    if not keys:
        raise ConfigError(f"{option}: {path} holds no key", hint=RECIPE)
    return keys


class Keys:
    """The keys of one file. Owner: the event loop. Raises `ConfigError` for a file that can't be used at start.

    One that can't be used later is said once in the log, and the keys stay what they were.
    """

    def __init__(self, path: str, option: str, least: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._option, self._least, self._clock = path, option, least, clock
        self._secret = secrets.token_bytes(32)
        self._state = self._look()
        self._digests = self._read()
        self._looked_at = clock()

    def _read(self) -> frozenset[bytes]:
        return frozenset(self._digest(key) for key in read_keys(self._path, self._option, self._least))

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=self._secret, digest_size=32).digest()

    def _look(self) -> tuple[int, int, int] | None:
        """What changes when the file does."""
        try:
            about = os.stat(self._path)
        except OSError:
            return None
        return about.st_mtime_ns, about.st_size, about.st_ino

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_INTERVAL_S:
            return
        self._looked_at = now
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            self._digests = self._read()
            log.info("%s: %s was read again, %d keys", self._option, self._path, len(self._digests))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)

    def check(self, authorization: str | None) -> None:
        """`authorization`: the header. Raises `Refusal` 401."""
        self._refresh()
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("no API key was given", hint="send it as `Authorization: Bearer KEY`")
        if self._digest(key.strip()) not in self._digests:
            raise unauthorized("this API key is not known here")


def unauthorized(message: str, hint: str = "") -> Refusal:
    refusal = Refusal(401, "invalid_api_key", message, hint=hint)
    refusal.headers["WWW-Authenticate"] = "Bearer"
    return refusal
