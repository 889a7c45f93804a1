"""How long our hooks hold the engine thread. Deliberate sleeps (an idle step) are not work and not counted."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class HasHookTime(Protocol):
    hook_s: float
    told_hook_s: float


S = TypeVar("S", bound=HasHookTime)


def timed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Add the method's duration to `self.hook_s` (seconds since the start)."""

    @functools.wraps(method)
    def wrapper(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        started = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.hook_s += time.perf_counter() - started

    return wrapper  # type: ignore[return-value]  # wraps() forgets that self is positional


def take_ms(owner: HasHookTime) -> float:
    """Milliseconds since the last call."""
    spent, owner.told_hook_s = owner.hook_s - owner.told_hook_s, owner.hook_s
    return round(spent * 1e3, 4)
