"""Results folders as people have them: damaged, foreign, mixed, void, with points missing."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from bench_parts import result_facts

from kvferry.bench import captions, figures
from kvferry.bench.environment import _gpus
from kvferry.bench.points import OURS, Folder, Point
from kvferry.bench.ruling import rule
from kvferry.bench.series import Series, load
from kvferry.cli import main
from kvferry.errors import ConfigError

POINT = Point("push", 1.0, 100, 4, 1)


def put(
    folder: Path, mode: str = "push", qps: float = 1.0, length: int = 100, iteration: int = 1, **settings: Any
) -> Path:
    point = Point(mode, qps, length, 4, iteration)
    Folder(folder).good(point, result_facts(point, 100, 10, **settings), "log")
    return folder / f"{point.name}.json"


def change(path: Path, **other: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))


@pytest.mark.parametrize(
    "other",
    [
        {"ttfts": [0.1, math.nan, 0.1, 0.1, 0.1]},
        {"ttfts": [0.1, None, 0.1, 0.1, 0.1]},
        {"ttfts": [0.1]},
        {"ttfts": [], "itls": [], "output_lens": []},
        {"itls": [[0.1]] * 4},
        {"itls": [3] * 5},
        {"itls": [["x"]] * 5},
        {"output_lens": [None] * 5},
        {"duration": None},
        {"duration": 0},
        {"request_throughput": "2"},
        {OURS: 3},
        {OURS: {"settings": {}}},
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, other: dict[str, Any]) -> None:
    change(put(tmp_path), **other)
    with pytest.raises(ConfigError, match=rf"{POINT.name}.json is damaged"):
        load(tmp_path)


def test_files_of_others_beside_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / "package.json").write_text("[1, 2]")
    (tmp_path / "points.json").write_text("nonsense")
    (tmp_path / "push_qps1_in100_out4_iter2.void.json").write_text('{"reasons": "text"}')
    found = load(tmp_path)
    assert [entry.mode for entry in found.series] == ["push"]
    assert [list(void.reasons) for void in found.void] == [["its file is damaged"]]


def test_two_files_of_one_point(tmp_path: Path) -> None:
    put(tmp_path).with_name("push_qps1.0_in100_out4_iter1.json").write_bytes(put(tmp_path).read_bytes())
    with pytest.raises(ConfigError, match="are of the same point"):
        load(tmp_path)


def test_results_that_were_made_otherwise_are_not_compared(tmp_path: Path) -> None:
    put(tmp_path, "pull", num=40)
    put(tmp_path, "push", num=100)
    assert len(load(tmp_path).series) == 2
    put(tmp_path, "push", profile="q")
    with pytest.raises(ConfigError, match=r"push_.*json was made with profile 'q', pull_.*json with 'p'"):
        load(tmp_path)


def test_a_setting_that_older_files_do_not_tell_is_no_difference(tmp_path: Path) -> None:
    put(tmp_path, "pull")
    put(tmp_path, "push", prompts="ids")
    assert len(load(tmp_path).series) == 2


def test_failed_requests_in_vllms_own_files_make_them_void(tmp_path: Path) -> None:
    """Leaving them out would flatter the mode that fails."""
    raw = {key: value for key, value in result_facts(POINT, 100, 10).items() if key != OURS}
    raw |= {"ttfts": [0.1, 0.1, 0.1, 0.0, 0.0], "output_lens": [4, 4, 4, 0, 0], "itls": [[0.1] * 3] * 3 + [[], []]}
    (tmp_path / f"{POINT.name}.json").write_text(json.dumps(raw))
    found = load(tmp_path)
    assert found.series == []
    assert [(void.point, list(void.reasons)) for void in found.void] == [
        (POINT, ["2 of 5 requests failed or have no token"])
    ]


def test_a_folder_of_void_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Folder(tmp_path).refused(POINT, {"reasons": ["late"]}, "")
    assert (
        main(["bench", "plot", "--results", str(tmp_path), "--metric", "ttft", "--out", str(tmp_path / "f.png")]) == 1
    )
    assert "all 1 points were refused" in capsys.readouterr().err
    assert main(["bench", "report", "--results", str(tmp_path)]) == 0
    assert "late" in (tmp_path / "report.html").read_text()


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path)
    out = tmp_path / "f.png"
    out.write_bytes(b"old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["bench", "plot", "--results", str(tmp_path), "--metric", "ttft", "--out", str(out)]) == 1
    assert out.read_bytes() == b"old"


def test_no_folder_is_told_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none is no folder"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    "args",
    [
        ["plot", "--metric", "ttft", "--out", "{}/file/x.png"],
        ["report", "--json", "{}/file/x.json"],
        ["report", "--json", "{}"],
    ],
)
def test_what_cannot_be_written_is_one_line(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["bench", *(arg.format(tmp_path) for arg in args), "--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path) in error


# -- figures


def lines_of(axis: Any) -> dict[str, list[float]]:
    return {
        line.get_label(): [float(y) for y in line.get_ydata()] for line in axis.lines if line.get_marker() != "None"
    }


def test_a_missing_point_is_a_gap(tmp_path: Path) -> None:
    """A line across it would show what was not measured."""
    for qps in (1.0, 2.0, 4.0):
        put(tmp_path, "pull", qps)
    put(tmp_path, "push", 1.0)
    put(tmp_path, "push", 4.0)
    Folder(tmp_path).refused(Point("push", 2.0, 100, 4, 1), {"reasons": ["late"]}, "")
    figure = figures.panels(load(tmp_path), "ttft", "input")
    drawn = lines_of(figure.axes[0])
    assert [math.isnan(y) for y in drawn["push"]] == [False, True, False]
    assert not any(map(math.isnan, drawn["pull"]))
    assert any("runs refused: 1" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "goodput"])
def test_nothing_is_cut_off_at_the_top(tmp_path: Path, metric: str) -> None:
    for qps in (1.0, 2.0):
        put(tmp_path, "push", qps)
    axis = figures.panels(load(tmp_path), metric, "input", (500.0, 500.0)).axes[0]
    highest = max(float(y) for line in axis.lines for y in line.get_ydata())
    assert axis.get_ylim()[0] == 0
    assert axis.get_ylim()[1] > highest * 1.05


def test_one_rate_alone_has_its_band_too(tmp_path: Path) -> None:
    put(tmp_path, "push", 1.0)
    axis = figures.panels(load(tmp_path), "ttft", "input").axes[0]
    bars = [line.get_ydata() for line in axis.lines if len(set(line.get_xdata())) == 1 and len(line.get_ydata()) == 2]
    assert [tuple(map(float, bar)) for bar in bars] == [pytest.approx((100.4, 103.6))]


def test_many_rates_close_together_do_not_write_over_each_other(tmp_path: Path) -> None:
    for qps in (0.1, 0.2, 0.3, 8.0):
        put(tmp_path, "push", qps)
    axis = figures.panels(load(tmp_path), "ttft", "input").axes[0]
    assert {label.get_rotation() for label in axis.get_xticklabels()} == {60.0}


def test_a_mode_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    put(tmp_path, "mine", 1.0, 100)
    put(tmp_path, "yours", 1.0, 100)
    put(tmp_path, "yours", 1.0, 200)
    axes = figures.panels(load(tmp_path), "ttft", "input").axes
    colours = [{line.get_label(): line.get_color() for line in axis.lines} for axis in axes]
    assert colours[0]["yours"] == colours[1]["yours"] != colours[0]["mine"]


def test_dollars_are_no_formula(tmp_path: Path) -> None:
    put(tmp_path, engine="vllm", model="/models/$x_{1$ <b>&")
    out = tmp_path / "f.svg"
    assert main(["bench", "plot", "--results", str(tmp_path), "--metric", "ttft", "--out", str(out)]) == 0
    assert "model $x_{1$ &lt;b&gt;&amp;" in out.read_text()


def test_the_caption_tells_what_the_engines_were_told(tmp_path: Path) -> None:
    put(tmp_path, engine_args=["--byte-scale=512"])
    assert "profile p, real transfers, --byte-scale=512; " in captions.caption(load(tmp_path), 4)


def test_machines_are_told_each(tmp_path: Path) -> None:
    put(tmp_path, "pull")
    path = put(tmp_path, "push")
    facts = json.loads(path.read_text())
    facts[OURS]["environment"] |= {"cpu_model": "Other", "gpus": "8x NVIDIA H200"}
    path.write_text(json.dumps(facts))
    text = captions.caption(load(tmp_path), 4)
    assert "on 2 cores of CPU <1>, 3.0 GiB and on 2 cores of Other, 3.0 GiB, 8x NVIDIA H200" in text


def test_what_is_behind_a_router_is_not_claimed_to_be_here(tmp_path: Path) -> None:
    put(tmp_path, "pull", engine="vllm", router=True)
    put(tmp_path, "push", engine="vllm", router=True)
    assert "engines behind a router, model m; " in captions.caption(load(tmp_path), 4)
    assert "load generator on 2 cores" in captions.caption(load(tmp_path), 4)
    assert main(["bench", "report", "--results", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "a router that ran already was asked" in page
    assert "Nothing is modelled" not in page


def test_gpus_by_the_driver(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 11\n")
    assert _gpus(tmp_path) == "2x NVIDIA H200"
    assert _gpus(tmp_path / "none") is None


# -- one transfer in time


def story(transfer_id: str = "abc", mode: str = "push") -> list[dict[str, Any]]:
    steps = [("router", "received"), ("router", "dispatched"), ("prefill", "queued"), ("decode", "registered")]
    steps += [("prefill", "computed"), ("prefill", "posted"), ("decode", "landed"), ("router", "first_token")]
    lines: list[dict[str, Any]] = [
        {"t": 10 + i / 100, "transfer_id": transfer_id, "side": side, "rank": 0, "event": event}
        for i, (side, event) in enumerate(steps)
    ]
    lines[1]["mode"] = mode
    lines[5] |= {"nbytes": 3_000_000, "descriptors": 5}
    return lines


def with_story(path: Path, mode: str) -> None:
    facts = json.loads(path.read_text())
    facts[OURS] |= {"story": story(f"{mode}-1", mode), "transfer_ids": [f"{mode}-1"]}
    path.write_text(json.dumps(facts))


def test_the_report_and_the_plot_show_a_transfer_of_each_mode(tmp_path: Path) -> None:
    for mode in ("pull", "push"):
        with_story(put(tmp_path, mode, 1.0), mode)
        with_story(put(tmp_path, mode, 2.0), mode)
    path = put(tmp_path, "colocated", 2.0)
    with_story(path, "colocated")
    facts = json.loads(path.read_text())
    facts[OURS]["story"] = [line for line in facts[OURS]["story"] if line["side"] == "router"]
    path.write_text(json.dumps(facts))
    assert main(["bench", "report", "--results", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("One transfer in time: ") == 2
    assert page.count("<svg") == 5
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    for said in ("transfer push-1, mode push", "3.0 MB in 5 descriptors", "2 requests/s, one of 5 requests"):
        assert said in text
    out = tmp_path / "t.svg"
    line = ["bench", "plot", "--results", str(tmp_path), "--metric", "timeline", "--out", str(out)]
    assert main([*line, "--transfer", "push-1"]) == 0
    for said in ("transfer push-1", "seed 11", "profile p", "on 2 cores of CPU"):
        assert said in out.read_text()


def test_a_story_with_a_torn_end_and_a_post_without_facts(tmp_path: Path) -> None:
    lines = story()
    del lines[5]["nbytes"], lines[5]["descriptors"]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "router-1.jsonl").write_text(whole + '{"t": 1')
    line = ["bench", "plot", "--metric", "timeline", "--out", str(tmp_path / "t.png"), "--story-dir", str(tmp_path)]
    assert main(line) == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("none", "", "is no folder"), ("x.jsonl", "{}\n", "no stories"), ("x.jsonl", "?\n", "no stories")],
)
def test_what_is_no_story_is_named(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "none" if name == "none" else tmp_path
    if text:
        (tmp_path / name).write_text(text)
    line = ["bench", "plot", "--metric", "timeline", "--out", str(tmp_path / "t.png"), "--story-dir", str(folder)]
    assert main(line) == 1
    assert said in capsys.readouterr().err


# -- the verdict


def series(mode: str, ttft: float, itl: list[float], qps: float = 1.0) -> Series:
    return Series(mode, qps, 10, 4, ttft=[ttft] * 4, tpot=[10.0] * 4, itl=itl, rates=[qps], durations=[4.0])


def test_pull_in_the_engine_loop_stands_for_pull_where_that_is_missing() -> None:
    both = [series("pull-inline", 200, [10.0]), series("push", 100, [10.0])]
    ruling = rule(both, None)
    assert ruling.mode == "push"
    assert "pull-inline stands for pull, which was not measured" in ruling.why
    assert "p90 TTFT and p99 ITL of push are 0.50 and 1.00 times those of pull-inline" in ruling.why
    assert "pull-inline" not in rule([*both, series("pull", 300, [10.0])], None).scores


def test_workloads_that_do_not_count_are_told() -> None:
    ruling = rule([series("pull", 9, [1.0]), series("push", 8, [1.0]), series("push", 9, [1.0], qps=8.0)], None)
    assert "workloads left out, without a valid result in each of these modes: 1" in ruling.why


@pytest.mark.parametrize("itl", [[], [0.0]])
def test_without_gaps_between_tokens_ttft_decides(itl: list[float]) -> None:
    ruling = rule([series("pull", 200, [10.0]), series("push", 100, itl)], None)
    assert (ruling.mode, ruling.scores["pull"]) == ("push", pytest.approx(2**0.5))
