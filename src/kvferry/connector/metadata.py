"""What one engine step carries from the scheduler's half of the connector to the workers'. Free of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.transfer.commands import Abort, Drop, Expect, Grown, Land, Ready, Rewind, Wait


@dataclass
class Reject:
    """D: this request's parameters are no transfer; its worker reports it as failed at once."""

    request: str
    transfer_id: str
    code: str
    reason: str


@dataclass
class StepMetadata:
    """In the order in which they are handed on. `waits`, `lands`, `drops`, `rejects`: decode; the others: prefill.

    `idle`: the step has no model work and a transfer is open, so the worker may sleep on the transfer thread's signal.
    """

    expects: list[Expect] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    lands: list[Land] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)  # KV there when this step's forward is, more will come
    parts: list[Grown] = field(default_factory=list)  # what `readies` add in this step, there layer by layer
    readies: list[Ready] = field(default_factory=list)  # KV complete when this step's forward is
    finished: list[Ready] = field(default_factory=list)  # KV complete already
    fences: list[Abort | Rewind] = field(default_factory=list)  # preempted after hand-over: wait before the forward
    idle: bool = False
    news: bool = False  # something leaves before the forward


IDLE = StepMetadata(idle=True)
"""Nothing new, nothing to compute, but a transfer is open. Shared: never changed."""

NOTHING = StepMetadata()
"""Nothing at all. Shared: never changed."""
