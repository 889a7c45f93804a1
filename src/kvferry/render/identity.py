"""Ids that a second worker makes again: inside of a session, `uuid.uuid4` draws from the session's own generator.

vLLM names responses, output items and tool calls by `uuid.uuid4`. A stream that goes on elsewhere must go on with the
names that were said.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from contextvars import ContextVar

_generator: ContextVar[random.Random | None] = ContextVar("kvferry_render_ids", default=None)
_system_uuid4 = uuid.uuid4


def seed_for(given: bytes | None, request_id: bytes | None, path: str, body: bytes) -> str:
    """The seed of a session: the one given, else one by which another worker finds the same names for the same
    request, if that has an id; else a random one.
    """
    if given is not None:
        return given.decode("latin-1")
    if request_id is None:
        return _system_uuid4().hex
    return hashlib.sha256(b"\0".join((request_id, path.encode(), body))).hexdigest()[:32]


def use(seed: str) -> None:
    """In this context, and in tasks started from it."""
    _generator.set(random.Random(seed))


def _uuid4() -> uuid.UUID:
    generator = _generator.get()
    if generator is None:
        return _system_uuid4()
    return uuid.UUID(int=generator.getrandbits(128), version=4)


def install() -> None:
    """For this process. Idempotent."""
    uuid.uuid4 = _uuid4
