"""Write docs/states.md from the protocol's tables: `python scripts/draw_states.py`. A test checks the page."""

from __future__ import annotations

from pathlib import Path

from kvferry.protocol import landing, legs, staging
from kvferry.protocol.table import mermaid


def page() -> str:
    parts = [
        "# The state machines",
        "Drawn from the tables by `scripts/draw_states.py`; each arrow is `event / action`. The rest is an error.",
        "## Prefill: one registration (`src/kvferry/protocol/legs.py`)",
        f"```mermaid\n{mermaid(legs.LEG_TABLE)}\n```",
        "## Decode: one prefill rank of one landing (`src/kvferry/protocol/landing.py`)",
        f"```mermaid\n{mermaid(landing.LEG_TABLE)}\n```",
        "## Staging: one of prefill's slots (`src/kvferry/protocol/staging.py`)",
        f"```mermaid\n{mermaid(staging.SLOT_TABLE)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "states.md").write_text(page())
