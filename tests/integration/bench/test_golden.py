"""The measurements against a server whose delays are known: right to 1%, by this file's own arithmetic over the
server's own record; and void when the server misbehaves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_parts import tiny_model
from golden import Golden

from kvferry.launch.model import PACKAGED, packaged_gguf, prepare

FIRST_MS = (200.0, 260.0, 320.0, 400.0, 500.0)
GAPS_MS = (40.0, 50.0, 65.0)
WARM_UPS = 2
TOKENS = 9
LENGTH = 60

pytestmark = pytest.mark.timeout(240)


def has_vllm() -> bool:
    return (
        importlib.util.find_spec("vllm") is not None
        and importlib.util.find_spec(PACKAGED["smollm2"].replace("-", "_")) is not None
    )


@pytest.fixture(scope="module")
def tokenizer() -> Path:
    """The folder of a real model: its tokenizer counts the prompts on both sides."""
    packaged_gguf("smollm2")
    return prepare("smollm2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "kvferry.cli", "bench", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)


def sweep(server: Golden, model: Path, folder: Path, *more: str | Path, mode: str = "colocated") -> Any:
    return bench(
        *("sweep", "--router", server.url, "--modes", mode, "--model", model, "--results", folder / "results"),
        *("--input-lens", str(LENGTH), "--output-lens", str(TOKENS), "--warm-ups", str(WARM_UPS), *more),
    )


def percentile(values: list[float], share: float) -> float:
    """By linear interpolation between order statistics, written out."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def assert_right(told: dict[str, Any], truth: list[float]) -> None:
    """Mean and percentiles to 1%."""
    assert told["n"] == len(truth)
    assert told["mean"] == pytest.approx(statistics.mean(truth), rel=0.01)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert told[name] == pytest.approx(percentile(truth, share), rel=0.01), name


LOADS = [
    "builtin",
    pytest.param("vllm", marks=pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")),
    pytest.param("aiperf", marks=pytest.mark.skipif(importlib.util.find_spec("aiperf") is None, reason="no aiperf")),
]


def one_of_three(check: Callable[[Path], None], tmp_path: Path) -> None:
    """What else runs on the machine for a moment moves a p99 by more than 1%, in one run. Wrong arithmetic is wrong in
    every run.
    """
    for number in (1, 2, 3):
        try:
            return check(tmp_path / str(number))
        except AssertionError:
            if number == 3:
                raise


@pytest.mark.parametrize("load", LOADS)
def test_the_whole_path_is_right_to_one_percent(load: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("model" if load == "builtin" else "tokenizer")
    one_of_three(lambda at: check_the_whole_path(load, folder, at), tmp_path)


def check_the_whole_path(load: str, folder: Path, tmp_path: Path) -> None:
    counts = folder if load != "builtin" else None
    with Golden(first_ms=FIRST_MS, gaps_ms=GAPS_MS, tokenizer=counts) as server:
        done = sweep(server, folder, tmp_path, "--load", load, "--qps", "4", "--num", "30")
        record = server.record()[WARM_UPS:]
    assert done.returncode == 0, done.stderr
    file = tmp_path / "results" / f"colocated_qps4_in{LENGTH}_out{TOKENS}_iter1.json"
    facts = json.loads(file.read_text())
    ours = facts["kvferry"]
    assert len(record) == 30
    ttft = [(entry["sent"][0] - entry["came"]) * 1e3 for entry in record]
    gaps = [(b - a) * 1e3 for entry in record for a, b in zip(entry["sent"], entry["sent"][1:], strict=False)]
    tpot = [(entry["sent"][-1] - entry["sent"][0]) * 1e3 / (TOKENS - 1) for entry in record]
    assert_right(ours["ttft_ms"], ttft)
    assert_right(ours["tpot_ms"], tpot)
    assert_right(ours["itl_ms"], gaps)
    took = max(entry["sent"][-1] for entry in record) - min(entry["came"] for entry in record)
    first_wait = 0.25 if load == "vllm" else 0.0  # vLLM's clock starts one drawn interval before its first request
    assert took * 0.99 < facts["duration"] < (took + 8 * first_wait) * 1.01
    assert {entry["input_len"] for entry in record} == {LENGTH} == set(facts["input_lens"])
    for name, told in (("mean", "mean"), ("median", "p50"), ("p99", "p99")):
        assert facts[f"{name}_ttft_ms"] == pytest.approx(ours["ttft_ms"][told], rel=0.001)
        assert facts[f"{name}_tpot_ms"] == pytest.approx(ours["tpot_ms"][told], rel=0.001)
    log = file.with_suffix(".log")
    assert log.stat().st_size > 100
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, log.name]


@pytest.mark.timeout(500)
def test_goodput_of_a_sweep_and_of_a_search(tmp_path: Path, model: Path) -> None:
    """One prompt after the other, 50 ms each, evenly sent: 20 requests/s are the limit, above it the queue grows."""
    one_of_three(lambda at: check_goodput(model, at), tmp_path)


def check_goodput(model: Path, tmp_path: Path) -> None:
    with Golden(first_ms=(50.0,), gaps_ms=(5.0,), queue=True) as server:
        done = bench(
            *(
                "goodput",
                "--router",
                server.url,
                "--modes",
                "colocated",
                "--model",
                model,
                "--ttft",
                "75",
                "--itl",
                "6",
            ),
            *(
                "--input-len",
                "20",
                "--output-len",
                "6",
                "--start",
                "12",
                "--floor",
                "9",
                "--seconds",
                "1",
                "--arrival",
                "constant",
            ),
            *("--json", tmp_path / "goodput.json"),
        )
        record = server.record()
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "goodput.json").read_text())["results"][0]
    assert 18.9 < (result["rate"] or 0.0) <= 20.2, result
    assert "do not hold" in result["limit"]
    assert [probe["qps"] for probe in result["probes"][:2]] == [12.0, 24.0]
    # Every probe, counted again from the server's record of it: two warm-ups and then its requests.
    at = 0
    for probe in result["probes"]:
        mine = record[at + WARM_UPS : at + WARM_UPS + probe["num"]]
        at += WARM_UPS + probe["num"]
        within = [
            (e["sent"][0] - e["came"]) * 1e3 <= 75 and (e["sent"][-1] - e["sent"][0]) * 1e3 / 5 <= 6 for e in mine
        ]
        took = mine[-1]["sent"][-1] - mine[0]["came"]
        share = sum(within) / len(within)
        if share >= 0.99:
            assert probe["share_within"] >= 0.99
            assert probe["goodput_rps"] == pytest.approx(sum(within) / took, rel=0.01)
        else:  # a queue that grows crosses the objective slowly: a millisecond on the way is worth a few requests
            assert probe["share_within"] == pytest.approx(share, abs=0.06)
    best = next(probe for probe in result["probes"] if probe["qps"] == result["rate"] and probe["holds"])
    assert best["share_within"] >= 0.99
    assert result["goodput_rps"] == best["goodput_rps"]
    assert "colocated" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("zero", "answers have no token"),
        ("error", "requests failed, the first: 500"),
        ("cut", r"requests failed, the first: the stream ended without [DONE]"),
        ("short", f"answers have not the {TOKENS} tokens asked for, the first has {TOKENS - 1}"),
        ("cached", "a prefix cache served"),
        ("late", "overran its timing model"),
    ],
)
def test_a_server_that_misbehaves_makes_the_run_void(
    wrong: str, said: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with Golden(first_ms=(30.0,), gaps_ms=(5.0,), wrong=wrong, wrong_from=WARM_UPS + 3) as server:
        done = sweep(server, model, tmp_path, "--load", "builtin", "--qps", "8,10", "--num", "6")
    assert done.returncode == 1
    names = {path.name for path in (tmp_path / "results").iterdir() if path.suffix == ".json"}
    stem = f"_in{LENGTH}_out{TOKENS}_iter1.void.json"
    assert names == {f"colocated_qps8{stem}", f"colocated_qps10{stem}"}, "no result, and the other point still ran"
    facts = json.loads((tmp_path / "results" / f"colocated_qps8{stem}").read_text())
    assert any(said in reason for reason in facts["reasons"]), facts["reasons"]
    assert said in done.stderr
    assert "0 measured, 0 there already, 2 void" in done.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("wrong", ["", "cached"])
def test_bytes_that_moved_by_the_stories(wrong: str, tmp_path: Path, model: Path) -> None:
    story = tmp_path / "story"
    story.mkdir()
    facts: dict[str, Any] = {"wrong": wrong, "wrong_from": WARM_UPS + 2, "story_dir": story, "kv_bytes": 64}
    with Golden(first_ms=(30.0,), gaps_ms=(5.0,), **facts) as server:
        more = ("--story-dir", story, "--kv-bytes", "64", "--block-size", "16")
        done = sweep(server, model, tmp_path, "--load", "builtin", "--qps", "10", "--num", "5", *more, mode="push")
    name = f"push_qps10_in{LENGTH}_out{TOKENS}_iter1"
    if not wrong:
        assert done.returncode == 0, done.stderr
        ours = json.loads((tmp_path / "results" / f"{name}.json").read_text())["kvferry"]
        transfer = ours["transfer"]
        assert transfer["moved_bytes"] == transfer["expected_bytes"] == 5 * 4 * 16 * 64
        assert transfer["exposed_ms"]["p50"] == pytest.approx(2.0, abs=0.01)
        assert transfer["descriptors"]["mean"] == 4
        assert {line["transfer_id"] for line in ours["story"]} < set(ours["transfer_ids"])
        assert [line["event"] for line in ours["story"]].count("posted") == 1
        return
    assert done.returncode == 1
    reasons = json.loads((tmp_path / "results" / f"{name}.void.json").read_text())["reasons"]
    assert any(f"moved {2 * 16 * 64} bytes, {4 * 16 * 64} were expected" in reason for reason in reasons), reasons


def test_without_warm_up_it_is_void(tmp_path: Path, model: Path) -> None:
    with Golden(first_ms=(20.0,), gaps_ms=(5.0,)) as server:
        done = sweep(server, model, tmp_path, "--load", "builtin", "--qps", "10", "--num", "3", "--warm-ups", "0")
    assert done.returncode == 1
    assert "no warm-up request was asked for" in done.stderr


def test_a_failing_warm_up_is_void(tmp_path: Path, model: Path) -> None:
    with Golden(first_ms=(20.0,), gaps_ms=(5.0,), wrong="error") as server:
        done = sweep(server, model, tmp_path, "--load", "builtin", "--qps", "10", "--num", "3")
    assert done.returncode == 1
    assert "warm-up requests failed" in done.stderr


def test_a_folder_of_another_sweep_is_refused_before_anything_is_sent(tmp_path: Path, model: Path) -> None:
    with Golden(first_ms=(20.0,), gaps_ms=(5.0,)) as server:
        common = ("--load", "builtin", "--num", "4", "--qps")
        assert sweep(server, model, tmp_path, *common, "10").returncode == 0
        asked = len(server.record())
        other = sweep(server, model, tmp_path, *common, "20", "--seed", "5")
        assert len(server.record()) == asked
    assert other.returncode == 1
    assert "was made with seed 0, this run has 5" in other.stderr
    assert other.stderr.count("\n") == 1


def test_what_is_there_is_kept_and_other_settings_are_refused(tmp_path: Path, model: Path) -> None:
    results = tmp_path / "results"
    with Golden(first_ms=(20.0,), gaps_ms=(5.0,)) as server:
        common = ("--load", "builtin", "--num", "4")
        assert sweep(server, model, tmp_path, *common, "--qps", "10").returncode == 0
        file = results / f"colocated_qps10_in{LENGTH}_out{TOKENS}_iter1.json"
        before, asked = file.read_bytes(), len(server.record())
        again = sweep(server, model, tmp_path, *common, "--qps", "10,20")
        assert again.returncode == 0, again.stderr
        assert "1 measured, 1 there already, 0 void" in again.stdout
        assert "[2/2] colocated_qps20" in again.stderr
        assert file.read_bytes() == before
        assert len(server.record()) == asked + 4 + WARM_UPS
        other = sweep(server, model, tmp_path, "--load", "builtin", "--num", "5", "--qps", "10")
    assert other.returncode == 1
    assert other.stderr.count("\n") == 1
    assert f"{file} was made with num 4, this run has 5" in other.stderr


@pytest.mark.parametrize("load", ["builtin", *LOADS[1:2]])
def test_ctrl_c_leaves_nothing_running_and_no_half_file(
    load: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("model" if load == "builtin" else "tokenizer")
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    mark = f"kvferry-test-{os.getpid()}-{time.monotonic_ns()}"
    with Golden(first_ms=(20.0,), gaps_ms=(5.0,), tokenizer=folder if load == "vllm" else None) as server:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "kvferry.cli",
                    "bench",
                    "sweep",
                    "--router",
                    server.url,
                    "--modes",
                    "colocated",
                ),
                *("--model", str(folder), "--results", str(tmp_path / "results"), "--input-lens", str(LENGTH)),
                *("--output-lens", "4", "--load", load, "--qps", "2,0.5", "--num", "6"),
            ],
            env={**os.environ, "TMPDIR": str(scratch), "KVFERRY_TEST_MARK": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "[2/2]" in line:
                break
        until = time.monotonic() + 60
        asked = len(server.record())
        while len(server.record()) < asked + WARM_UPS + 1:  # it really runs
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; the same command goes on" in err
    kept = sorted(path.name for path in (tmp_path / "results").iterdir())
    name = f"colocated_qps2_in{LENGTH}_out4_iter1"
    assert kept == [f"{name}.json", f"{name}.log"]
    assert list(scratch.iterdir()) == []
    left = []
    for other in psutil.process_iter():
        try:
            if other.environ().get("KVFERRY_TEST_MARK") == mark and other.status() != psutil.STATUS_ZOMBIE:
                left.append(other.cmdline())
        except psutil.Error:
            continue
    assert left == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--modes", "pull,push"], "name the one mode it runs in"),
        (["--modes", "psh"], "did you mean 'push'"),
        (["--modes", "push", "--load", "vlm"], "did you mean 'vllm'"),
        (["--modes", "push", "--iterations", "0"], "--iterations: 0"),
        (["--modes", "push", "--story-dir", "/nonexistent"], "/nonexistent is no folder"),
        (["--modes", "push", "--profile", "instant"], "is for --engine sim"),
        (["--modes", "push", "--num", "0"], "--num: 0"),
        (["--modes", "push", "--load", "builtin"], "is the router running, and ready?"),
    ],
)
def test_bad_arguments_are_one_line(args: list[str], said: str, tmp_path: Path, model: Path) -> None:
    done = bench(
        *("sweep", "--router", "http://127.0.0.1:9", "--qps", "1", "--input-lens", "10", "--model", model),
        *("--results", tmp_path / "r", *args),
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert len([line for line in done.stderr.splitlines() if "error" in line]) == 1
