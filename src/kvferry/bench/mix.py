"""A mixed workload: short and long prompts, shared beginnings, conversations. Everything follows from the seed.

For a length L, of a hundred requests about
  45 are short and share nothing: L/4 tokens
  30 begin with one of 8 system prompts of L tokens (the nth is 1/n as frequent as the first), and have L/4 of their own
  10 are long and share nothing: 2 L tokens
  15 are turns of 6 conversations: the turn before and L/4 tokens more, beginning at L; after 6 turns a new one begins
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.bench.workload import ModelFacts

Kind = Literal["random", "mixed"]
KINDS: tuple[Kind, ...] = ("random", "mixed")
SYSTEM_PROMPTS = 8
CONVERSATIONS = 6
TURNS = 6
_KINDS = ("short", "shared", "long", "turn")
_SHARES = (0.45, 0.30, 0.10, 0.15)


@dataclass(frozen=True)
class Asked:
    """One request. `session`: its name, "" for none."""

    tokens: list[int]
    session: str = ""


def mixed(facts: ModelFacts, seed: int, length: int, count: int) -> list[Asked]:
    random = np.random.default_rng([seed, length, count])

    def drawn(tokens: int) -> list[int]:
        return [int(token) for token in random.choice(facts.token_ids, max(1, tokens))]

    own = max(1, length // 4)
    systems = [drawn(length) for _ in range(SYSTEM_PROMPTS)]
    often = 1 / np.arange(1, SYSTEM_PROMPTS + 1)
    talks: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    names, turns = [0] * CONVERSATIONS, [0] * CONVERSATIONS
    out: list[Asked] = []
    for kind in random.choice(_KINDS, count, p=_SHARES):
        if kind == "short":
            out.append(Asked(drawn(own)))
        elif kind == "shared":
            out.append(Asked(systems[random.choice(SYSTEM_PROMPTS, p=often / often.sum())] + drawn(own)))
        elif kind == "long":
            out.append(Asked(drawn(2 * length)))
        else:
            at = int(random.integers(CONVERSATIONS))
            if turns[at] % TURNS == 0:
                talks[at], names[at] = drawn(length), names[at] + 1
            else:
                talks[at] = talks[at] + drawn(own)
            turns[at] += 1
            out.append(Asked(talks[at], f"conversation-{seed}-{at}-{names[at]}"))
    return out


def longest(length: int) -> int:
    """Tokens of the longest prompt that can come."""
    return max(2 * length, length + (TURNS - 1) * max(1, length // 4))
