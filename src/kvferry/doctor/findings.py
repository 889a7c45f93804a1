"""What the doctor says: findings, and the exit code they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "warn", "FAIL"]
EXIT: dict[Status, int] = {"ok": 0, "warn": 1, "FAIL": 2}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `check`: what was looked at, the same words every time; `subject`: of which engine or pair; `said`: what
    was found; `todo`: what to do, empty where all is well."""

    status: Status
    check: str
    subject: str
    said: str
    todo: str = ""


def ok(check: str, subject: str, said: str) -> Finding:
    return Finding(status="ok", check=check, subject=subject, said=said)


def warn(check: str, subject: str, said: str, todo: str) -> Finding:
    """It works and would disappoint."""
    return Finding(status="warn", check=check, subject=subject, said=said, todo=todo)


def fail(check: str, subject: str, said: str, todo: str) -> Finding:
    """It would not work."""
    return Finding(status="FAIL", check=check, subject=subject, said=said, todo=todo)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 fine, 1 works but would disappoint, 2 broken."""
    return max((EXIT[finding.status] for finding in findings), default=0)
