"""`kvferry bench router`: scripted engines, our router and one that is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvferry.cli import main

SMALL = ["--qps", "40", "--rounds", "1", "--seconds", "1", "--chunks", "8", "--streams", "4", "--long-chunks", "50"]
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the router needs a core to itself")


@two_cores
def test_adds_to_what_the_engine_takes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    targets = "direct,kvferry-push,kvferry-upstream-pull"
    assert main(["bench", "router", "--targets", targets, *SMALL, "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    points = {point["target"]: point for point in facts["points"]}
    assert set(points) == set(targets.split(","))
    assert len({point["num"] for point in points.values()}) == 1  # the same arrivals for each
    for name, point in points.items():
        assert point["errors"] == 0 and point["num"] > 10
        assert ("added_ms" in point) == (name != "direct")
        if name != "direct":
            assert point["added_ms"]["p50"] > 0 and point["cpu_ms_per_request"] > 0
    for relayed in facts["relayed"].values():
        assert relayed["errors"] == 0 and relayed["chunks_per_s"]["p50"] > 0


@two_cores
def test_a_peer_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "router", "--targets", "vllm-router", "--peer-command", "no-such-router", *SMALL]
    assert main(line) == 1
    assert "no-such-router" in capsys.readouterr().err


def test_a_target_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "router", "--targets", "kvferry-pussh"]) == 1
    assert "kvferry-push" in capsys.readouterr().err
