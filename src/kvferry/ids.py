"""Identifiers are types: none is ever cut apart to find another in it."""

from __future__ import annotations

import secrets
from typing import NewType

TransferId = NewType("TransferId", str)
"""One dispatch of one request: fresh on every try, made by the router, the only thing P and D are paired by."""

EngineId = NewType("EngineId", str)
"""One engine (all its ranks), stable as long as its configuration names it."""

RegistrationId = NewType("RegistrationId", int)
"""One destination on one decode rank; unique within one life of that rank, never reused."""

LifeId = NewType("LifeId", int)
"""One life of one rank's transfer agent: random at start, so a restarted engine is never taken for the old one."""


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_hex(16))


def new_life_id() -> LifeId:
    return LifeId(secrets.randbits(63))
