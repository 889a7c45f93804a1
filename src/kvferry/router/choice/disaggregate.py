"""Whether a prompt is worth a transfer, or decode computes it itself. Pure.

Computing u tokens on D takes u times the seen time per token, and for that long each request that D decodes stands
still as well. The transfer and the second leg take a + b u, as seen. D computes what costs less: the border is

    u * t * (1 + running) = a + b * u

and has no constant in it. A D that decodes many streams takes short prompts only; an idle one longer ones; and where
moving a token takes longer than computing it, all.
"""

from __future__ import annotations

from typing import Literal

from kvferry.errors import ConfigError
from kvferry.router.choice.cost import Costs

Setting = Literal["always", "auto"] | int
Decision = Literal["prefill-decode", "decode-only"]
EXPLORE = 50
"""Of `auto`: one in so many that would stay on D goes through P, so that the costs stay those of today."""


def parse_setting(text: str) -> Setting:
    """`always`, `auto` or a number of tokens. Raises `ConfigError`."""
    if text == "always":
        return "always"
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--disaggregate: {text!r}", hint="expected always, auto, or a number of tokens from 1 up")
    return int(text)


def border(costs: Costs, running: int) -> float | None:
    """Prompts with fewer uncached tokens stay on a D that decodes `running` requests; None: not known yet."""
    prefill, overhead = costs.prefill.fit(), costs.overhead.fit()
    if prefill is None or overhead is None or not prefill[1]:
        return None
    lost = prefill[1] * (1 + running) - overhead[1]
    return overhead[0] / lost if lost > 0 else float("inf")


def decide(setting: Setting, uncached: int, costs: Costs, running: int, turn: int) -> Decision:
    """`uncached`: tokens of the prompt that D does not hold. `turn`: how many were decided before."""
    if setting == "always":
        return "prefill-decode"
    if isinstance(setting, int):
        return "decode-only" if uncached < setting else "prefill-decode"
    limit = border(costs, running)
    if limit is None or uncached >= limit or turn % EXPLORE == EXPLORE - 1:
        return "prefill-decode"
    return "decode-only"
