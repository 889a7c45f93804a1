"""`--log-level` of the router: which lines come."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvferry.router.seen import logs


@pytest.fixture
def bare() -> Iterator[None]:
    """The root logger as a fresh process has it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(("level", "lines"), [("info", 2), ("warning", 1), ("error", 0)])
def test_lines_by_level(level: str, lines: int, bare: None) -> None:
    out = io.StringIO()
    logs.set_up("text", level, out)
    logging.getLogger("kvferry.router.requests").info("went well")
    logging.getLogger("kvferry.router.requests").warning("failed")
    assert len(out.getvalue().splitlines()) == lines
