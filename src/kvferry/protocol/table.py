"""One way to write a state machine: a table from (state, event type) to (next state, what to do).

An event that the table doesn't list for the present state raises `UnexpectedEvent` and changes nothing. The diagrams
in the docs are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvferry.errors import KVFerryError

Table = Mapping[tuple[Enum, type], tuple[Enum, str]]
"""(state, event type) -> (next state, name of the action; '' for none)."""


class UnexpectedEvent(KVFerryError):
    code = "unexpected_event"


def transition(table: Table, machine: str, state: Enum, event: Any) -> tuple[Enum, str]:
    """The next state and action name. Raises `UnexpectedEvent`."""
    try:
        return table[state, type(event)]
    except KeyError:
        raise UnexpectedEvent(f"{machine}: {type(event).__name__} is not expected in state {state.name}") from None


def mermaid(table: Table) -> str:
    """The table as a Mermaid state diagram, one arrow per row, in the table's order."""
    rows = [
        f"    {state.name} --> {target.name}: {event.__name__}" + (f" / {action}" if action else "")
        for (state, event), (target, action) in table.items()
    ]
    return "\n".join(["stateDiagram-v2", *rows])
