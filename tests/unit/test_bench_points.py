from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path

import pytest

from kvferry.bench.arguments import lengths, rates, words
from kvferry.bench.pace import Pace, spoken
from kvferry.bench.points import OURS, Folder, Point, check_writable, in_order, point_named, write_whole
from kvferry.errors import ConfigError

POINT = Point("upstream-push", 0.25, 16000, 128, 2)


def test_published_file_names() -> None:
    assert Point("push", 4.0, 1000, 128, 1).name == "push_qps4_in1000_out128_iter1"
    assert POINT.name == "upstream-push_qps0.25_in16000_out128_iter2"


@pytest.mark.parametrize("point", [POINT, Point("pull-inline", 8.0, 1000, 2, 11), Point("push", 1e-5, 2, 2, 1)])
def test_a_name_gives_its_point(point: Point) -> None:
    assert point_named(point.name) == point


@pytest.mark.parametrize("name", ["points", "push_qps4_in10_out1", "push_qps1.2.3_in1_out1_iter1", "x/../y"])
def test_other_files_are_no_points(name: str) -> None:
    assert point_named(name) is None


def test_all_points_of_a_mode_come_together() -> None:
    points = in_order(["pull", "push"], [1, 2], [10], [4], 2)
    assert [point.name.split("_in")[0] for point in points] == ["pull_qps1"] * 2 + ["pull_qps2"] * 2 + [
        *["push_qps1"] * 2,
        *["push_qps2"] * 2,
    ]
    assert [point.iteration for point in points[:4]] == [1, 2, 1, 2]


SETTINGS = {"num": 10, "seed": 0}


def test_a_point_made_with_the_same_settings_is_done(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert not folder.done(POINT, SETTINGS)
    folder.good(POINT, {"ttfts": [0.1], OURS: {"settings": SETTINGS}}, "log")
    assert folder.done(POINT, SETTINGS)
    assert folder.log(POINT).read_text() == "log"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".log"]


def test_other_settings_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.good(POINT, {"ttfts": [0.1], OURS: {"settings": SETTINGS}}, "")
    with pytest.raises(ConfigError, match=r"was made with num 10, this run has 12"):
        folder.done(POINT, {**SETTINGS, "num": 12})
    folder.json(POINT).write_text(json.dumps({"ttfts": [0.1]}))
    with pytest.raises(ConfigError, match="not written by this tool"):
        folder.done(POINT, SETTINGS)


def test_a_folder_takes_points_of_one_sweep_only(tmp_path: Path) -> None:
    """Also where the points themselves are others; how many requests they have may differ."""
    folder = Folder(tmp_path)
    folder.good(POINT, {"ttfts": [0.1], OURS: {"settings": SETTINGS}}, "")
    (tmp_path / "notes.json").write_text("[]")
    (tmp_path / "pull_qps1_in2_out2_iter1.json").write_text('{"kvferry": 3}')
    folder.check({**SETTINGS, "num": 99})
    with pytest.raises(ConfigError, match=rf"{POINT.name}.json was made with seed 0, this run has 7"):
        folder.check({**SETTINGS, "seed": 7})


@pytest.mark.parametrize("ours", [3, {}, {"settings": []}])
def test_a_file_that_does_not_tell_its_settings_is_of_others(tmp_path: Path, ours: object) -> None:
    folder = Folder(tmp_path)
    folder.json(POINT).write_text(json.dumps({"ttfts": [0.1], OURS: ours}))
    with pytest.raises(ConfigError, match="not written by this tool"):
        folder.done(POINT, SETTINGS)


def test_what_could_not_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    check_writable("--json", None)
    check_writable("--json", tmp_path / "new" / "f.json")
    check_writable("--json", tmp_path / "f")
    with pytest.raises(ConfigError, match=r"--json: .* is a folder"):
        check_writable("--json", tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable("--json", tmp_path / "f" / "g.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ttfts": 3}'])
def test_a_damaged_file_is_no_result(tmp_path: Path, text: str) -> None:
    folder = Folder(tmp_path)
    folder.json(POINT).write_text(text)
    assert not folder.done(POINT, SETTINGS)


def test_a_good_run_takes_the_place_of_a_void_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.refused(POINT, {"reasons": ["late"]}, "log")
    assert json.loads(folder.void(POINT).read_text())["reasons"] == ["late"]
    assert not folder.json(POINT).exists()
    folder.good(POINT, {"ttfts": []}, "log")
    assert not folder.void(POINT).exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    write_whole(path, "old")

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"f\.json cannot be written: No space left on device"):
        write_whole(path, "new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        Folder(tmp_path).check(SETTINGS)


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="--results"):
        Folder(tmp_path / "f").check(SETTINGS)


def test_lists_take_commas_and_blanks() -> None:
    assert words("push, pull") == ["push", "pull"]
    assert lengths("1000 4000,16000") == [1000, 4000, 16000]
    assert rates("0.5 8") == [0.5, 8.0]


@pytest.mark.parametrize(
    ("read", "text"),
    [(lengths, "10,x"), (lengths, "1"), (lengths, "5,5"), (rates, "0"), (rates, "inf"), (rates, "1,1.0000001")],
)
def test_bad_lists(read: object, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        read(text)  # type: ignore[operator]


def test_the_pace_is_learned() -> None:
    pace = Pace(overhead_s=10.0, start_s=60.0, num=20, warm_ups=0)
    a, b = Point("pull", 2.0, 10, 50, 1), Point("push", 2.0, 10, 50, 1)
    assert pace.point_s(a) == pytest.approx(10 + 10 + 1)
    assert pace.left_s([a, b]) == pytest.approx(42 + 120)
    assert pace.left_s([a, b], running="pull") == pytest.approx(42 + 60)
    pace.took(a, 42.0)
    assert pace.left_s([b], running="push") == pytest.approx(42)


def test_durations_are_spoken() -> None:
    assert [spoken(seconds) for seconds in (8, 300, 9000)] == ["8 s", "5 min", "2.5 h"]
