"""What a cell of the failure matrix says, and how it is written: see `failure_matrix.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from failure_rows import COMES_LATE_S, CUT_S, FROZEN_S, HEARD_AGAIN_S, LATE_S, READS_LATE_S
from failure_scene import COMPUTES_S, LIMITS, MODES, STAGES

from kvferry.protocol.landing import Landings
from kvferry.router.dispatch.explain import cause_of

STAGE_TEXT = {
    "before": "P computes the prompt, D has named no blocks",
    "registered": "D has named its blocks, P computes",
    "met": "both are there, and the first copy is being posted (stream: of the first chunk)",
    "flying": "copies are under way (stream: of the first chunk, and P computes on)",
    "landed": "all bytes are there, the word of it is under way (where D reads: that it has)",
    "decoding": "D decodes, P has let go",
}
TITLES = {
    "before": "before registration",
    "registered": "registered, prefill running",
    "met": "rendezvous met, nothing posted",
    "flying": "writes in flight",
    "landed": "landed, not yet decoding",
    "decoding": "decoding",
}
_SETTLE_S = Landings(dial_s=1, prefill_s=1, transfer_s=1, fence_s=1).settle_s
CLOCK: dict[str, tuple[float, str]] = {
    "0": (0.0, "at once"),
    "computed": (COMPUTES_S, "prefill is done"),
    "comes": (COMPUTES_S, "D comes"),
    "settle": (_SETTLE_S, f"{_SETTLE_S:g} s"),
    "thaw": (FROZEN_S, "the link is back"),
    "heard": (HEARD_AGAIN_S, "P has welcomed D"),
    "over": (CUT_S, "the copies have ended"),
    "late": (LATE_S, "P is done at last"),
    "slow": (2.0, "the bytes have crawled over"),
    "comes_late": (COMES_LATE_S, "D comes"),
    "reads": (READS_LATE_S, "D has read"),
    "queue": (15.0, "there are blocks"),
    "stall": (5.0, "5 s"),
    **{name: (seconds, f"`{name}`") for name, seconds in LIMITS.items()},
}
"""Name -> (seconds in a scene, how the page says it)."""


@dataclass(frozen=True)
class End:
    """One side's; see `failure_matrix.py`."""

    code: str
    told: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()

    @staticmethod
    def of(text: str) -> End:
        code, _, times = text.partition("@")
        told, _, freed = times.partition("/")
        first = tuple(name.strip() for name in told.split("+") if name.strip())
        last = tuple(name.strip() for name in freed.split("+") if name.strip())
        for name in (*first, *last):
            assert name in CLOCK, f"{text}: no time is called {name!r}"
        return End(code.strip(), first, last or first)

    @property
    def hears(self) -> bool:
        """The engine is told."""
        return not self.code.startswith("=") and self.code not in ("had", "dead", "-")

    @property
    def outcome(self) -> str:
        """What is counted; '' if nothing is."""
        return "" if self.code in ("had", "dead", "-") else self.code.removeprefix("=")


@dataclass(frozen=True)
class Cell:
    """`impossible`: why there is no such thing; then the rest is empty. `open`: what is wrong with it, if it is."""

    row: str
    stage: str
    modes: tuple[str, ...]
    p: End = End("-")
    d: End = End("-")
    flags: tuple[str, ...] = ()
    client: str = ""
    impossible: str = ""
    open: str = ""

    def metrics(self) -> set[str]:
        out = set()
        for side, end in (("prefill", self.p), ("decode", self.d)):
            if end.outcome:
                out.add(f"kvferry:transfers_total{{{side},{end.outcome}}}")
        if self.p.outcome == "lease_lapsed" or "expired" in self.flags:
            out.add("vllm:nixl_num_kv_expired_reqs_total")
        if "expired" in self.flags:
            out.add("kvferry:transfers_total{prefill,lease_lapsed}")
        if "posts" in self.flags:
            out.add("vllm:nixl_num_failed_transfers_total")
        if "quarantine" in self.flags:
            out.add("kvferry:quarantined_blocks")
        return out


ALL = " ".join(MODES)
PUSH = "push pull-write"  # P writes, when prefill is done
WRITES = "push stream pull-write"
WHOLE = "push pull pull-write"  # nothing moves before prefill is done
EVERY = " ".join(STAGES)
Spec = tuple[str, str, str, str, str] | tuple[str, str, str, str] | tuple[str, str]


@dataclass(frozen=True)
class Row:
    """`text`: what happens exactly. `client`: stages[:modes] -> what the client gets where D does not answer, if it
    isn't D's error; `whatever`: in all cells. `failure_client.py` has what may stand there. `more`: where else it is
    shown, for real."""

    name: str
    text: str
    specs: tuple[Spec, ...]
    client: dict[str, str] = field(default_factory=dict)
    whatever: str = ""
    more: tuple[str, ...] = ()

    def cells(self) -> Iterator[Cell]:
        for spec in self.specs:
            if len(spec) == 2:
                where, _, modes = spec[0].partition(":")
                for stage in where.split():
                    yield Cell(self.name, stage, tuple((modes or ALL).split()), impossible=spec[1])
                continue
            stages, modes, p, d, *flags = spec
            for stage in stages.split():
                yield self._cell(stage, tuple(modes.split()), End.of(p), End.of(d), tuple(" ".join(flags).split()))

    def _cell(self, stage: str, modes: tuple[str, ...], p: End, d: End, flags: tuple[str, ...]) -> Cell:
        if self.whatever:
            told = self.whatever
        elif d.code in ("ok", "had"):
            told = "its answer"
        else:
            told = self._said(stage, modes) or client_of(d.outcome)
        return Cell(self.name, stage, modes, p, d, flags, told)

    def _said(self, stage: str, modes: tuple[str, ...]) -> str:
        for where, text in self.client.items():
            stages, _, of = where.partition(":")
            if stage in stages.split() and set(modes) <= set((of or ALL).split()):
                return text
        return ""


def client_of(code: str) -> str:
    """The router's answer where a transfer failed on D with this code."""
    assert code, "say what the client gets"
    cause = cause_of(code)
    return f"{cause.http_status} `{cause.code}`"
