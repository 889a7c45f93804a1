"""Write docs/failures.md from the tests' failure matrix: `python scripts/draw_failures.py`. A test checks the page."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from failure_cells import CLOCK, STAGE_TEXT, TITLES, Cell, End, Row  # noqa: E402
from failure_matrix import MATRIX  # noqa: E402
from failure_scene import LIMITS, MODES, STAGES  # noqa: E402

HEAD = """# When something breaks

Drawn from the table in `tests/support/failure_matrix.py` by `scripts/draw_failures.py`; do not edit.

Each row of the matrix is a fault, each line one stage of a transfer at which it strikes: what the prefill engine (P)
and the decode engine (D) do, within which time, what the client gets, and which metrics move.
`tests/fault/test_matrix.py` runs every line, in every mode named, with the real transfer cores of both sides over an
in-memory fabric and side channel and an injected clock. A line passes only if the outcomes, the times and the metrics
are those stated here, each side is told exactly once, nothing is written to a block after it went back, nothing is left
open, and another transfer between the two (or whoever was started in place of the dead) works; and only if the real
router, before engines whose requests end as these sides ended, gives its client what is stated here, whole and
streamed. What is shown with real processes and engines too is named under the fault.

## Stages

"""

AFTER_STAGES = f"""
## How to read it

- **Ends.** `ok`, or the code that the story, the log and `kvferry:transfers_total` give; *held nothing*: counted as
  ended so, and there was nothing to free; *has ended*: well, before the fault; *nothing*: this side knows of no
  transfer.
- **Modes.** In `pull` D reads, in `pull-write` P writes, which is also mode pull: `pull_by` in
  [configuration.md](configuration.md#who-moves-the-bytes-of-a-pull).
- **Times** are from the fault on, or from where the cell says (`D comes`, `prefill is done`: one second after the fault
  in the tests); *at once* is less than half a second. Names of settings are those of
  [configuration.md](configuration.md); the tests use
  {", ".join(f"{name} {value:g}" for name, value in LIMITS.items())}.
  After *blocks* comes when they are free, if that is later.
- **The client** of the router, with `--retries 0`: what one try ends in. With tries left, a failure before the first
  byte goes to other engines as a new transfer ([operations.md](operations.md#another-try)), and the client gets that
  one's answer. Where D's request fails, the router asks D's side channel why; its answer carries the
  reason, and the status is that of the router's own table.
- **Metrics** are those of the engines that are left, without the histograms of posts. `prefill,CODE` stands for
  `kvferry:transfers_total{{side="prefill",outcome="CODE"}}`, *failed posts* for `vllm:nixl_num_failed_transfers_total`,
  *expired* for `vllm:nixl_num_kv_expired_reqs_total`, *quarantine* for `kvferry:quarantined_blocks`, which is above 0
  for that while.

"""


def page() -> str:
    stages = "| Stage | What there is |\n|---|---|\n"
    stages += "".join(f"| {TITLES[stage]} | {STAGE_TEXT[stage]} |\n" for stage in STAGES)
    return HEAD + stages + AFTER_STAGES + "\n".join(section(row) for row in MATRIX)


def section(row: Row) -> str:
    lines = [f"## {row.name[0].upper()}{row.name[1:]}", "", row.text, ""]
    lines += ["| Stage | Mode | P | D | The client gets | Metrics |", "|---|---|---|---|---|---|"]
    cells = sorted(row.cells(), key=lambda cell: STAGES.index(cell.stage))
    for _, same in groupby(cells, key=lambda cell: (cell.stage, said(cell))):
        alike = list(same)
        modes = [mode for cell in alike for mode in cell.modes]
        which = "all" if len(modes) == len(MODES) else ", ".join(modes)
        lines.append(f"| {TITLES[alike[0].stage]} | {which} | {said(alike[0])} |")
    if row.more:
        lines += ["", "For real too: " + ", ".join(f"`{name}`" for name in row.more) + "."]
    return "\n".join(lines) + "\n"


def said(cell: Cell) -> str:
    """All but stage and modes."""
    if cell.impossible:
        return f"cannot happen: {cell.impossible} | | | "
    known = f" **Not yet so:** {cell.open}." if cell.open else ""
    return f"{end(cell.p)} | {end(cell.d)} | {cell.client}{known} | {metrics(cell)}"


def end(what: End) -> str:
    fixed = {"had": "has ended", "dead": "is dead", "-": "nothing"}.get(what.code)
    if fixed is not None:
        return fixed
    if not what.hears:
        return f"`{what.outcome}`, held nothing"
    told = moment(what.told)
    freed = "" if what.freed == what.told else f"; blocks {moment(what.freed)}"
    return f"`{what.code}` {told}{freed}"


_FROM = ("computed", "comes", "heard", "over", "comes_late", "queue", "late", "reads", "thaw", "slow")


def moment(names: tuple[str, ...]) -> str:
    since = [CLOCK[name][1] for name in names if name in _FROM]
    after = [CLOCK[name][1] for name in names if name not in _FROM and name != "0"]
    if not since:
        return f"after {' + '.join(after)}" if after else "at once"
    start = " and ".join(since)
    return f"{' + '.join(after)} after {start}" if after else f"when {start}"


def metrics(cell: Cell) -> str:
    short = {
        "vllm:nixl_num_failed_transfers_total": "failed posts",
        "vllm:nixl_num_kv_expired_reqs_total": "expired",
        "kvferry:quarantined_blocks": "quarantine",
    }
    names = [short.get(name, name.removeprefix("kvferry:transfers_total").strip("{}")) for name in cell.metrics()]
    ours = sorted(name for name in names if "," in name)
    return ", ".join([*(f"`{name}`" for name in ours), *sorted(name for name in names if "," not in name)]) or "none"


if __name__ == "__main__":
    (ROOT / "docs" / "failures.md").write_text(page())
