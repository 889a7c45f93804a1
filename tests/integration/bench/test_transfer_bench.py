"""`kvferry bench transfer`: both processes, real NIXL, a small shape."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvferry import cli
from kvferry.bench.records import VoidRun
from kvferry.bench.transfer_bench import Bench, Job, in_flight_s, steps_of
from kvferry.bench.transfer_pair import Pair
from kvferry.bench.transfer_records import Posted
from kvferry.bench.transfer_shape import PRESETS, Shape, pool_blocks, shape_named, table
from kvferry.ids import TransferId
from kvferry.transfer.commands import Grown, Ready

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]

SHAPE, TOKENS = "16x2x64x16", 2000
BLOCKS, BLOCK_BYTES = 125, 16 * 2 * 16 * 256
BYTES = BLOCKS * BLOCK_BYTES
SPREADS = ("plan_ms", "post_ms", "wire_ms", "landed_ms", "exposed_ms", "engine_thread_ms")


@pytest.fixture(autouse=True)
def needs_nixl() -> None:
    pytest.importorskip("nixl_cu12")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvferry.cli", "bench", "transfer", *map(str, arguments)]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=100, check=False)


def a_job(**changes: Any) -> Job:
    fields = {
        "shape": shape_named(SHAPE),
        "layout": "LBHNC",
        "tokens": TOKENS,
        "fragmentation": 0.5,
        "mode": "push",
        "chunks": 4,
        "layer_groups": 1,
        "staging": "auto",
        "prefill_ms": None,
        "verify": "full",
        "runs": 1,
        "seed": 3,
    }
    return Job(**{**fields, **changes})


def assert_spread(told: dict[str, float], truth: list[float]) -> None:
    assert set(told) == {"median", "min", "max"}
    for name, of in (("median", statistics.median), ("min", min), ("max", max)):
        assert told[name] == pytest.approx(of(truth), rel=1e-3, abs=1e-4), name


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        ("--mode", "push", "--staging", "off"),
        ("--mode", "push", "--staging", "always"),
        ("--mode", "pull", "--staging", "off"),
        ("--mode", "stream", "--chunks", "5", "--staging", "off"),
    ],
    ids=lambda more: " ".join(more[1::2]),
)
def test_every_mode_tells_all_figures(tmp_path: Path, more: tuple[str, ...]) -> None:
    where = tmp_path / "out.json"
    done = bench(
        "--shape", SHAPE, "--tokens", str(TOKENS), "--fragmentation", "0.3", "--runs", "3", "--json", where, *more
    )
    assert done.returncode == 0, done.stderr
    facts, streams = json.loads(where.read_text()), "stream" in more
    runs = facts["runs"]
    ours, floor, naive = runs["ours"], runs["floor"], runs["naive"]
    assert [len(runs[kind]) for kind in ("ours", "floor", "naive")] == [3, 3, 3]

    for name in SPREADS[:-1]:
        assert_spread(facts[name], [one[name] for one in ours])
    sides = [(one["prefill_thread_ms"], one["decode_thread_ms"]) for one in ours]
    assert_spread(facts["engine_thread_ms"], [max(both) for both in sides])
    assert_spread(facts["engine_thread"]["prefill_ms"], [p for p, _ in sides])
    assert_spread(facts["engine_thread"]["decode_ms"], [d for _, d in sides])
    for side in ("prefill", "decode"):
        took = [one[f"{side}_verify_ms"] for one in facts["runs"]["ours"]]
        assert_spread(facts["verify"][f"{side}_ms"], took)
        assert min(took) > 0
    seconds = "wire_ms" if streams else "landed_ms"
    assert_spread(facts["gb_per_s"], [BYTES / one[seconds] / 1e6 for one in ours])
    assert_spread(facts["floor"]["gb_per_s"], [BYTES / one["total_s"] / 1e9 for one in floor])
    assert_spread(facts["floor"]["landed_ms"], [one["total_s"] * 1e3 for one in floor])
    assert_spread(facts["naive"]["landed_ms"], [one["total_s"] * 1e3 for one in naive])
    assert_spread(facts["naive"]["engine_thread_ms"], [(one["plan_s"] + one["post_s"]) * 1e3 for one in naive])

    assert facts["bytes"] == BYTES == 16_384_000
    assert {one["descriptors"] for one in floor} == {1}
    assert facts["naive"]["descriptors"] == BLOCKS * 16 * 2
    if "always" in more:
        assert BYTES / (4 << 20) < facts["descriptors"] < 6, "slots"
    else:
        assert 16 < facts["descriptors"] < BLOCKS * 16
    assert facts["naive"]["op"] == ("READ" if "pull" in more else "WRITE")
    for one in ours:
        assert 0 < one["plan_ms"] < one["landed_ms"] and 0 < one["wire_ms"] <= one["landed_ms"]
        assert one["prefill_thread_ms"] > 0 and one["decode_thread_ms"] > 0
    assert facts["environment"]["ucx"]["UCX_TLS"] and facts["environment"]["nixl"]
    assert facts["arguments"]["seed"] == 0 and facts["arguments"]["shape"]["layers"] == 16
    if streams:
        prefill_ms = facts["arguments"]["prefill_ms"]
        assert facts["arguments"]["prefill_of_push"] == 1.5 and prefill_ms > 0
        # The first of five parts is there after a fifth of prefill; handing it over may be late on a busy machine.
        assert all(one["landed_ms"] - one["exposed_ms"] > 0.4 * prefill_ms for one in ours)
        assert facts["push"]["landed_ms"]["min"] > 0 and facts["ratios"]["exposed_to_push"] > 0
    else:
        assert all(one["posts"] == 1 and one["landed_ms"] == one["exposed_ms"] for one in ours)
        assert "push" not in facts
    for word in ("plan", "landed", "engine thread, prefill", "floor: speed", "naive: engine thread"):
        assert word in done.stdout
    assert f"{facts['landed_ms']['median']:.2f}" in done.stdout


def test_layers_leave_within_a_step(tmp_path: Path) -> None:
    where = tmp_path / "out.json"
    shape = ("--shape", "8x1x64x16", "--tokens", "8000", "--mode", "stream", "--chunks", "1", "--layer-groups", "4")
    done = bench(*shape, "--prefill-ms", "200", "--runs", "2", "--json", where)
    assert done.returncode == 0, done.stderr
    facts = json.loads(where.read_text())
    assert facts["posts"] > 1 and facts["bytes"] == 500 * 8 * 16 * 256
    assert facts["arguments"]["prefill_ms"] == 200 and facts["arguments"]["prefill_of_push"] is None
    # The first of four groups is there after 50 ms.
    assert all(one["landed_ms"] - one["exposed_ms"] > 100 for one in facts["runs"]["ours"])


def test_blocks_outermost_are_one_piece_each(tmp_path: Path) -> None:
    where = tmp_path / "out.json"
    shape = ("--shape", SHAPE, "--tokens", str(TOKENS), "--layout", "BLHNC", "--fragmentation", "1")
    done = bench(*shape, "--runs", "1", "--json", where)
    assert done.returncode == 0, done.stderr
    facts = json.loads(where.read_text())
    assert BLOCKS - 5 < facts["descriptors"] <= BLOCKS
    assert facts["naive"]["descriptors"] == BLOCKS * 16 * 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--shape", "qwen3-32b-tp"), "--shape: unknown name 'qwen3-32b-tp' (did you mean 'qwen3-32b-tp8'?)"),
        (("--shape", "64x0x128x16"), "--shape: '64x0x128x16' (expected LxHxDxBLOCK"),
        (("--tokens", "0"), "--tokens: 0 (expected 1 or more)"),
        (("--tokens", "100000000"), "--tokens: 100000000 of this shape need 2 x"),
        (("--fragmentation", "1.5"), "--fragmentation: 1.5 (expected a chance, 0 to 1)"),
        (("--mode", "stream", "--chunks", "9", "--tokens", "100"), "--chunks: 9 (expected 1 to 7, the blocks)"),
        (("--layer-groups", "2"), "--layer-groups with --mode push (only stream"),
        (("--runs", "0"), "--runs: 0 (expected 1 or more)"),
        (("--json", "/dev/null/out.json"), "/dev/null/out.json cannot be written"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvferry: error: {complaint}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stop_leaves_no_process(number: signal.Signals) -> None:
    shm = set(os.listdir("/dev/shm"))
    line = command("--shape", SHAPE, "--tokens", str(TOKENS), "--mode", "stream", "--runs", "100000")
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None and process.stderr.readline().startswith("round 1")
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)  # as a terminal does
        rest = process.stderr.read().splitlines()
        assert process.wait(20) == (-9 if number is signal.SIGKILL else 130)
    assert len(children) == 2
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert len(gone) == 2 and not alive
    left = [name for name in set(os.listdir("/dev/shm")) - shm for one in children if str(one.pid) in name]
    assert not left
    if number is not signal.SIGKILL:
        assert rest[-1] == "stopped" and not any("Traceback" in line for line in rest)


# -- wrong bytes -----------------------------------------------------------------------------------------------------


def corrupt(pair: Pair, tables: Any, index: int) -> None:
    """One byte of that logical block, in the last layer, comes from elsewhere."""
    block = tables.decode[index]
    to = 15 * pool_blocks(BLOCKS) * (BLOCK_BYTES // 16) + block * (BLOCK_BYTES // 16) + 1234
    overwrite(pair, to)


def overwrite(pair: Pair, to: int) -> None:
    """One byte of D's memory, by another one of P's."""
    pair.decode.ask("drive")
    pair.prefill.ask("floor", 1, 77, to)
    pair.decode.ask("rest")


def sides() -> list[psutil.Process]:
    """Of this process; other tests may have left it a resource tracker."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "kvferry.bench.transfer_side" in one.cmdline()]


def test_a_wrong_byte_is_found() -> None:
    job = a_job()
    with Pair(job.shape, job.layout, job.blocks, job.staging, job.verify) as pair:
        bench = Bench(job, pair)
        pair.prefill.ask("fill", 1)
        tables = bench.tables()
        bench.ours("push", tables)
        bench.check_blocks("push", tables)
        corrupt(pair, tables, 41)
        with pytest.raises(
            VoidRun, match=r"^push: logical block 41 \(\d+ on P, \d+ on D\) is not on D what it is on P"
        ):
            bench.check_blocks("push", tables)
        bench.floor()
        bench.check_floor()
        overwrite(pair, BYTES - 1)
        with pytest.raises(VoidRun, match="floor"):
            bench.check_floor()


@pytest.mark.parametrize("kind", ["ours", "naive"])
def test_wrong_bytes_end_the_command(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(Bench, kind)

    def wrong(self: Bench, *arguments: Any) -> Any:
        made = right(self, *arguments)
        corrupt(self._pair, arguments[-1], 7)
        return made

    monkeypatch.setattr(Bench, kind, wrong)
    where = tmp_path / "out.json"
    line = ["bench", "transfer", "--shape", SHAPE, "--tokens", str(TOKENS), "--json", str(where)]
    assert cli.main(line) == 1
    said = capsys.readouterr()
    assert said.out == "" and not where.exists()
    who = "push" if kind == "ours" else "naive"
    assert re.fullmatch(rf"kvferry: error: {who}: logical block 7 \(.*\n", said.err)
    assert not sides()


def test_a_side_that_dies_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def floor(self: Bench) -> Any:
        os.kill(self._pair.prefill.pid, signal.SIGKILL)
        return self._pair.floor(1)

    monkeypatch.setattr(Bench, "floor", floor)
    began = time.monotonic()
    assert cli.main(["bench", "transfer", "--shape", SHAPE, "--tokens", str(TOKENS)]) == 1
    assert time.monotonic() - began < 60
    assert "kvferry: error: prefill side: its process ended with signal 9" in capsys.readouterr().err
    assert not sides()


# -- shapes, tables, steps -------------------------------------------------------------------------------------------


def test_presets_have_the_published_sizes() -> None:
    qwen = PRESETS["qwen3-32b-tp8"]
    assert qwen.blocks(16_384) == 1024 and 1024 * qwen.block_bytes == 512 << 20
    assert qwen.block_bytes // qwen.layers == 8 << 10
    assert PRESETS["llama-70b-tp8"].block_bytes * 8 == 16 * (320 << 10)  # 320 KiB per token on eight ranks
    assert shape_named("30x3x64x16") == PRESETS["smollm2"] == Shape(30, 3, 64, 16)


@pytest.mark.parametrize("fragmentation", [0.0, 0.125, 0.5, 1.0])
def test_tables_are_as_fragmented_as_asked(fragmentation: float) -> None:
    random = np.random.default_rng(5)
    cuts = []
    for _ in range(20):
        ids = table(random, 1024, fragmentation)
        assert len(set(ids.tolist())) == 1024 and ids.min() >= 0 and ids.max() < pool_blocks(1024)
        cuts.append(float(np.mean(np.diff(ids) != 1)))
    assert statistics.mean(cuts) == pytest.approx(fragmentation, abs=0.01)
    if fragmentation in (0, 1):
        assert set(cuts) == {fragmentation}
    assert not np.array_equal(ids, table(random, 1024, fragmentation))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_smallest_tables_too(blocks: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = table(random, blocks, 1.0)
        assert len(ids) == blocks and not np.any(np.diff(ids) == 1)


def test_steps_cover_the_prompt_once() -> None:
    job = a_job(mode="stream", chunks=4, layer_groups=3, tokens=1990)
    ids = tuple(range(500, 500 + BLOCKS))
    steps = steps_of(job, "stream", TransferId("t"), ids, 0.6)
    assert [at for at, _ in steps] == pytest.approx([0.05 * step for step in range(1, 13)])
    *grown, last = [what for _, what in steps]
    assert isinstance(last, Ready) and last.block_ids == ids and last.num_tokens == 1990
    assert all(isinstance(one, Grown) for one in grown)
    named = [one.block_ids for one in grown if isinstance(one, Grown)]
    assert sum(named, ()) == ids and [len(new) for new in named[:4]] == [31, 0, 0, 31]
    assert [one.planes for one in grown if isinstance(one, Grown)][:4] == [5, 10, None, 5]
    assert [one.tokens for one in grown if isinstance(one, Grown)] == [496] * 3 + [992] * 3 + [1488] * 3 + [1990] * 2


def test_overlapping_copies_count_once() -> None:
    def flight(began: float, ended: float) -> Posted:
        return Posted(1, 1, 0.0, 0.0, began, ended)

    assert in_flight_s([flight(1, 3), flight(2, 4), flight(2.5, 3), flight(7, 8)]) == pytest.approx(4)
    assert in_flight_s([]) == 0
