"""Which cores a part of a benchmark has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """This process, and what it starts, on those cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
