"""scripts/plot_policies.py: what each bar is compared with, and what is no result."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_policies.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def write(folder: Path, name: str, rate: float | None) -> None:
    result = {"mode": "push", "rate": rate, "limit": "x", "ttft_ms": {"p99": 900.0} if rate else None}
    facts = {"results": [result], "objectives": {"ttft_ms": 1000.0, "itl_ms": 50.0}}
    (folder / f"{name}.json").write_text(json.dumps(facts))


def test_bars_are_compared_with_the_plain_one(script: dict[str, Any], tmp_path: Path) -> None:
    for name, rate in (("prefill-least_loaded", 12.0), ("prefill-round_robin", 8.0), ("bind-late", None)):
        write(tmp_path, name, rate)
    write(tmp_path, "bind-early", 5.0)
    rows = script["rows"](script["variants"](tmp_path))
    assert rows[1:] == [
        ("bind", "early", "5", "1.00", "900", "x"),
        ("bind", "late", "0", "-", "-", "x"),
        ("prefill", "round_robin", "8", "1.00", "900", "x"),
        ("prefill", "least_loaded", "12", "1.50", "900", "x"),
    ]


def test_a_figure(script: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, "bind-early", 5.0)
    script["draw"](script["variants"](tmp_path), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_no_results(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies\.sh"):
        script["variants"](tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.json: expected the result"):
        script["variants"](tmp_path)
