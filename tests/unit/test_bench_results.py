"""A results folder: taken together, drawn, judged, and put on one page."""

from __future__ import annotations

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_parts import result_facts as facts

from kvferry.bench.points import OURS, Folder, Point
from kvferry.bench.ruling import rule
from kvferry.bench.series import Series, load
from kvferry.cli import main
from kvferry.errors import ConfigError
from kvferry.story import Story


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = Folder(tmp_path)
    for mode, ttft, gap in (("colocated", 100, 30), ("pull", 150, 10), ("push", 110, 10)):
        for qps in (1.0, 2.0):
            for length in (100, 200):
                for iteration in (1, 2):
                    point = Point(mode, qps, length, 4, iteration)
                    folder.good(point, facts(point, ttft * qps + iteration, gap), "log")
    folder.refused(Point("push", 4.0, 100, 4, 1), {"reasons": ["late <b>"]}, "log")
    return tmp_path


def test_iterations_are_taken_together(results: Path) -> None:
    found = load(results)
    assert len(found.series) == 12
    assert found.modes() == ["colocated", "pull", "push"]
    one = found.series[0]
    assert (one.mode, one.qps, one.input_len, len(one.ttft), len(one.files)) == ("colocated", 1.0, 100, 10, 2)
    told = one.facts()
    assert told["ttft_ms"]["mean"] == pytest.approx(
        statistics.mean([101 + i for i in range(5)] + [102 + i for i in range(5)])
    )
    assert told["tpot_ms"]["p50"] == pytest.approx(30.0)
    assert told["requests_per_s"] == 2.0
    assert [void.point.name for void in found.void] == ["push_qps4_in100_out4_iter1"]


def test_goodput_of_a_point() -> None:
    series = Series("push", 1.0, 10, 4, ttft=[100, 200, 300], tpot=[10, 30, 10], durations=[2.0])
    assert series.goodput(250, 20) == 0.5
    assert series.goodput(300, 20) == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "damaged"), ('{"ttfts": [], "itls": []}', "has no output_lens.*--save-detailed")],
)
def test_files_that_cannot_be_used_are_named(results: Path, text: str, said: str) -> None:
    (results / "push_qps1_in100_out4_iter1.json").write_text(text)
    with pytest.raises(ConfigError, match=f"push_qps1_in100_out4_iter1.json.*{said}"):
        load(results)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no point"):
        load(tmp_path)


def test_vllms_own_files_can_be_drawn(tmp_path: Path) -> None:
    point = Point("push", 1.0, 100, 4, 1)
    raw = {key: value for key, value in facts(point, 100, 10).items() if key != OURS}
    (tmp_path / f"{point.name}.json").write_text(json.dumps(raw))
    assert load(tmp_path).ours() == []
    assert (
        main(["bench", "plot", "--results", str(tmp_path), "--metric", "ttft", "--out", str(tmp_path / "f.svg")]) == 0
    )


# -- the verdict


def series(mode: str, ttft: float, itl: float, qps: float = 1.0) -> Series:
    return Series(mode, qps, 10, 4, ttft=[ttft] * 4, tpot=[itl] * 4, itl=[itl] * 12, rates=[qps], durations=[4.0])


def test_the_best_at_both_wins() -> None:
    ruling = rule([series("colocated", 100, 40), series("pull", 200, 10), series("push", 110, 10)], None)
    assert ruling.mode == "push"
    assert ruling.scores["colocated"] == pytest.approx(2.0)
    assert ruling.scores["pull"] == pytest.approx(2**0.5)
    assert ruling.scores["push"] == pytest.approx(1.1**0.5)


def test_a_simpler_mode_within_the_margin_wins() -> None:
    near = [series("colocated", 100, 10), series("pull", 99, 10), series("push", 98, 10)]
    assert rule(near, None).mode == "colocated"
    assert "less simple" in rule(near, None).why


def test_with_objectives_goodput_decides() -> None:
    both = [series("colocated", 100, 40), series("push", 400, 10)]
    assert rule(both, (500.0, 20.0)).mode == "push"
    assert rule(both, (200.0, 50.0)).mode == "colocated"
    assert rule(both, (1.0, 1.0)).mode == ""


def test_only_common_workloads_count() -> None:
    ruling = rule([series("colocated", 100, 10), series("push", 50, 5), series("push", 9000, 900, qps=8.0)], None)
    assert ruling.mode == "push"
    assert [row.workload for row in ruling.rows] == [(1.0, 10, 4)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([series("push", 1, 1)], "at least two"),
        ([series("push", 1, 1), series("pull", 1, 1, qps=2.0)], "no workload has a valid result in each of pull, push"),
    ],
)
def test_no_verdict(given: list[Series], why: str) -> None:
    ruling = rule(given, None)
    assert ruling.mode == ""
    assert why in ruling.why


# -- what is drawn and written


class Page(HTMLParser):
    """The texts and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_report_is_one_self_contained_page(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "points.json"
    assert main(["bench", "report", "--results", str(results), "--json", str(out)]) == 0
    assert capsys.readouterr().out.startswith("push: scores: ")
    page = Page((results / "report.html").read_text())
    text = " ".join(page.texts)
    assert page.tags.count("svg") == 3
    assert all(link.startswith("#") for link in page.links), "nothing is fetched from elsewhere"
    assert "script" not in page.tags
    for said in (
        "push for",
        "Modelled:",
        "Real:",
        "push_qps4_in100_out4_iter1",
        "late <b>",
        "CPU <1>",
        "The rule:",
        "seed 11",
    ):
        assert said in text.replace("  ", " "), said
    told = json.loads(out.read_text())
    assert len(told["points"]) == 12
    keys = {"mode", "qps", "input_len", "output_len", "ttft_ms", "tpot_ms", "itl_ms", "requests_per_s"}
    assert all(keys <= point.keys() for point in told["points"])
    assert {"mean", "p50", "p90", "p99"} <= told["points"][0]["ttft_ms"].keys()
    assert told["void"][0]["reasons"] == ["late <b>"]
    assert told["verdict"]["mode"] == "push"


def test_a_report_of_real_engines_says_so(tmp_path: Path) -> None:
    for mode in ("pull", "push"):
        point = Point(mode, 1.0, 100, 4, 1)
        Folder(tmp_path).good(point, facts(point, 100, 10, engine="vllm"), "log")
    assert main(["bench", "report", "--results", str(tmp_path), "--ttft", "200", "--itl", "20"]) == 0
    text = " ".join(Page((tmp_path / "report.html").read_text()).texts)
    assert "Nothing is modelled" in text
    assert "Modelled:" not in text
    assert "within 200 ms TTFT" in text


@pytest.mark.parametrize("panels", ["input", "qps"])
@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "goodput"])
def test_figures_have_a_panel_each_and_a_caption(results: Path, metric: str, panels: str) -> None:
    out = results / "f.svg"
    goals = ["--ttft", "120", "--itl", "20"] if metric == "goodput" else []
    assert (
        main(
            [
                "bench",
                "plot",
                "--results",
                str(results),
                "--metric",
                metric,
                "--panels",
                panels,
                "--out",
                str(out),
                *goals,
            ]
        )
        == 0
    )
    text = " ".join(part.strip() for part in Page(out.read_text()).texts if part.strip())
    for title in ("100 prompt tokens", "200 prompt tokens") if panels == "input" else ("1 requests/s", "2 requests/s"):
        assert title in text
    for said in ("colocated", "pull", "push", "profile p", "4 out", "10 requests per point", "seed 11", "CPU <1>"):
        assert said in text


def test_a_png(results: Path) -> None:
    out = results / "sub" / "f.png"
    assert main(["bench", "plot", "--results", str(results), "--metric", "tpot", "--out", str(out)]) == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_timeline_of_the_median_transfer(tmp_path: Path) -> None:
    router, prefill, decode = (Story(tmp_path, side) for side in ("router", "prefill", "decode"))
    for name, first in (("fast", 0.2), ("median", 0.3), ("slow", 0.9)):
        router.note(name, "received", t=10.0)
        router.note(name, "dispatched", t=10.001, mode="push")
        prefill.note(name, "queued", t=10.01)
        decode.note(name, "registered", t=10.02)
        prefill.note(name, "computed", t=10.1)
        prefill.note(name, "matched", t=10.1)
        prefill.note(name, "posted", t=10.12, nbytes=2_000_000, descriptors=7)
        decode.note(name, "landed", t=10.15)
        router.note(name, "first_token", t=10.0 + first)
    out = tmp_path / "t.svg"
    assert main(["bench", "plot", "--metric", "timeline", "--story-dir", str(tmp_path), "--out", str(out)]) == 0
    text = " ".join(Page(out.read_text()).texts)
    for said in ("transfer median, mode push", "2.0 MB in 7 descriptors", "prefill engine", "landed", "30.0 ms"):
        assert said in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--metric", "ttf", "--out", "f.png"], "did you mean 'ttft'"),
        (["--metric", "ttft", "--out", "f.pdf"], "neither .png nor .svg"),
        (["--metric", "ttft", "--out", "f.png"], "--results: needed"),
        (["--metric", "goodput", "--out", "f.png", "--results", "."], "needs --ttft and --itl"),
        (["--metric", "timeline", "--out", "f.png"], "--story-dir: needed"),
        (["--metric", "timeline", "--out", "f.png", "--story-dir", "."], "no transfer with a first token"),
    ],
)
def test_bad_plot_arguments_are_one_line(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "plot", *args]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "plot", "--results", str(results), "--metric", "ttft", "--out", "f.png"]) == 1
    assert "pip install 'kvferry[plot]'" in capsys.readouterr().err
