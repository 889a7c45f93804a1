"""The key that engines, routers and doctors of one deployment share, and where it comes from.

Who has it may ask, register and be believed on the side channel; who hasn't gets no further than the handshake. A file
is the usual place: its path may stand in settings and logs, the key itself never does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError

FILE_VARIABLE = "KVFERRY_AUTH_KEY_FILE"
KEY_VARIABLE = "KVFERRY_AUTH_KEY"
KEY_HELP = f"file with the key that the engines have (default: ${FILE_VARIABLE}, or the key in ${KEY_VARIABLE})"
MIN_CHARACTERS = 32  # a key that can be guessed can be found out by who listens on the wire
_MOST_BYTES = 4096
RECIPE = "make a key with `umask 077; openssl rand -hex 32 > FILE`, one for all engines and routers"


class AuthKey:
    """One shared key. `name` tells two keys apart in logs; the key can't be found from it."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.name = self.derive("name", 4).hex()

    def derive(self, purpose: str, size: int = 32) -> bytes:
        """`size` bytes that who has the key can make too, others for each purpose."""
        return hashlib.blake2b(self.text.encode(), digest_size=size, person=purpose.encode()).digest()

    def __repr__(self) -> str:
        return f"AuthKey({self.name})"

    def __str__(self) -> str:
        return f"key {self.name} from {self.source}"


def load_key(path: str = "", environ: Mapping[str, str] = os.environ) -> AuthKey | None:
    """The key in the file at `path`, else in that of $KVFERRY_AUTH_KEY_FILE, else $KVFERRY_AUTH_KEY; None: no key is
    set. Raises `ConfigError`."""
    if path:
        return _from_file(path, "auth_key_file")
    if environ.get(FILE_VARIABLE):
        return _from_file(environ[FILE_VARIABLE], f"${FILE_VARIABLE}")
    if environ.get(KEY_VARIABLE):
        return _checked(environ[KEY_VARIABLE], f"${KEY_VARIABLE}")
    return None


def make_key_file(path: Path) -> None:
    """A fresh key, readable by its owner only, in place of what was there."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_hex(32) + "\n")


def check_reach(host: str, key: AuthKey | None) -> None:
    """Raises `ConfigError` for an address that others than this machine could reach, where there is no key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"side_channel_host: {host!r} can be reached from other machines, and no key is set: without one the side "
            "channel binds to loopback only",
            hint=f"set auth_key_file or ${FILE_VARIABLE}; {RECIPE}; or leave side_channel_host at 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Names other than 'localhost' are not looked up, and count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def read_private(path: str, setting: str, most_bytes: int, recipe: str, renewed: str) -> bytes:
    """A secret's file, one byte above `most_bytes` at the most. `recipe`: how it is made; `renewed`: what to make anew.

    Raises `ConfigError` for one that can't be read, or that everybody can.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}", hint=recipe) from None
    if mode & stat.S_IRWXO:
        said = f"{setting}: {path} is open to every user of this machine (mode {mode:04o})"
        raise ConfigError(said, hint=f"`chmod 600 {path}`, and {renewed} if others may have read it")
    return raw


def _from_file(path: str, setting: str) -> AuthKey:
    raw = read_private(path, setting, _MOST_BYTES, RECIPE, "a new key")
    try:
        return _checked(raw.decode(), f"{setting}: {path}", source=path)
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is no text", hint=RECIPE) from None


def _checked(text: str, setting: str, source: str = "") -> AuthKey:
    text = text.strip()
    if not text:
        raise ConfigError(f"{setting} is empty", hint=RECIPE)
    if not MIN_CHARACTERS <= len(text) <= _MOST_BYTES:
        raise ConfigError(
            f"{setting} has {len(text)} characters", hint=f"expected {MIN_CHARACTERS} to {_MOST_BYTES}: {RECIPE}"
        )
    return AuthKey(text, source or setting)
