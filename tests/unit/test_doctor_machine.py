"""UCX's tables, as it prints them."""

from __future__ import annotations

import numpy as np

from kvferry.transfer.machine import efa, routes
from kvferry.transfer.probe import _pieces

HEAD = "[1796013106.6] [vm:21098:0]   "


def table(peer: str, what: str, *rows: str) -> list[str]:
    border = "+--------+-------------+--------+"
    cells = [f"| {peer} |", f"| {what} |", border, "| Range | Description | Config |", border, *rows, border]
    return [HEAD + line for line in [border, *cells]]


READ = "remote memory read by ucp_get*{}into host memory from host"
WRITE = "remote memory write by ucp_put*{}from cuda/GPU0 memory to cuda"


def test_the_table_of_the_other_process_for_many_accesses_is_taken():
    log = [
        *table("D-0f self cfg#0", READ.format("(multi) "), "| 0..inf | zero-copy | cma/memory |"),
        *table("D-0f inter-node cfg#1", READ.format(" "), "| 0..inf | zero-copy | tcp/lo |"),
        *table(
            "D-0f inter-node cfg#1",
            READ.format("(fast-completion)(multi) "),
            "| 0 | short | rc_mlx5/mlx5_0:1 |",
            "| 1..8184 | copy-out | rc_mlx5/mlx5_0:1 |",
            "| 8185..2M | zero-copy | rc_mlx5/mlx5_0:1 |",
            "| 2M..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |",
        ),
        *table(
            "D-0f intra-node cfg#2", "active message by ucp_am_send*(multi) from host memory", "| 0..inf | a | tcp/x |"
        ),
        *table("D-0f intra-node cfg#2", WRITE.format(" "), "| 0..inf | zero-copy | cuda_ipc/cuda |"),
        "something else | that | UCX | says |",
    ]
    found = routes("\n".join(log))
    assert [(one.op, one.least, one.most) for one in found] == [
        ("GET", 0, 0),
        ("GET", 1, 8184),
        ("GET", 8185, 2 << 20),
        ("GET", 2 << 20, None),
        ("PUT", 0, None),
    ]
    assert found[3].via.endswith("rc_mlx5/mlx5_1:1") and found[4].via == "cuda_ipc/cuda"


def test_a_log_that_says_nothing_gives_nothing():
    assert routes("") == () and routes("UCX INFO something\n| x |\n") == ()


def test_efa_is_told_by_fi_info(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert efa() == "not told: no fi_info here"
    program = tmp_path / "fi_info"
    for script, answer in (
        ("echo 'provider: efa'", "present"),
        ("echo 'fi_getinfo: -61'; exit 61", "absent"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert efa() == answer


def test_pieces_cover_the_bytes_and_are_never_adjacent():
    addresses, sizes = _pieces(1 << 40, 10_000, 4096, True, seed=3)
    assert int(sizes.sum()) == 10_000 and sizes.tolist() == [4096, 4096, 1808]
    order = np.sort(addresses)
    assert (np.diff(order) == 8192).all() and order[0] == 1 << 40
    whole, size = _pieces(7, 10_000, 4096, False, seed=3)
    assert (whole.tolist(), size.tolist()) == ([7], [10_000])
