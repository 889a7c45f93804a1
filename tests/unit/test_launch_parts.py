"""Ports, state folder, models, timeline, what the demo prints."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvferry import cli
from kvferry.errors import ConfigError
from kvferry.launch import model as models
from kvferry.launch.demo import Answer, differences, side_by_side
from kvferry.launch.ports import Ports
from kvferry.launch.process import ManagedProcess
from kvferry.launch.state import ProcessState, State, StateDir
from kvferry.launch.timeline import LABELS, PULL_LABELS, bars, story_lines
from kvferry.story import Story, read_story


def _listen(port: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_a_held_port_is_given_to_nobody_else_but_its_server_may_listen() -> None:
    ports = Ports()
    held = {ports.free() for _ in range(50)}
    assert len(held) == 50
    others = [socket.socket() for _ in range(50)]
    for other in others:
        other.bind(("127.0.0.1", 0))
    assert not held & {other.getsockname()[1] for other in others}
    for port in list(held)[:3]:
        _listen(port).close()
    ports.release()
    for other in others:
        other.close()


def test_ports_in_a_row() -> None:
    ports = Ports()
    first = ports.free(4)
    for port in range(first, first + 4):
        with pytest.raises(ConfigError, match="named twice"):
            ports.named(port, "x")
    ports.release()


def test_a_taken_port_is_named_with_its_holder() -> None:
    with _listen() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"router: port {port} is taken by \S+ \(pid \d+\)"):
            Ports().named(port, "router")
    ports = Ports()
    assert ports.named(port, "router") == port
    ports.release()


def _state(**changes: object) -> State:
    row = ProcessState(name="p", role="prefill", pid=1, started=1.0, marker="m", url="u", log="l")
    facts: dict[str, object] = {
        "phase": "ready",
        "mode": "push",
        "model": "m",
        "url": "http://x",
        "launcher_pid": 1,
        "launcher_started": 2.0,
        "story_dir": "s",
        "processes": (row,),
    }
    return State(**{**facts, **changes})  # type: ignore[arg-type]


def test_state_comes_back_as_written_and_damage_is_named(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    assert folder.read() is None
    folder.write(_state())
    assert folder.read() == _state()
    folder.state.write_text('{"phase": "ready"')
    with pytest.raises(ConfigError, match=r"state\.json is damaged"):
        folder.read()
    folder.remove()
    folder.remove()
    assert folder.read() is None


def test_a_state_folder_has_one_launcher(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    first.acquire()
    first.write(_state(url="http://here"))
    assert second.locked()
    with pytest.raises(ConfigError, match="in use by push at http://here"):
        second.acquire()
    first.release()
    assert not second.locked()
    second.acquire()
    second.release()


def test_models_by_path_and_unknown_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.prepare(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        models.prepare(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        models.prepare("smolm2")


def test_a_prepared_model_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"12345")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "packaged_gguf", lambda name: gguf)
    calls: list[Path] = []

    def convert(source: Path, target: Path, *rest: object) -> None:
        calls.append(source)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    made = models.prepare("smollm2")
    assert made == tmp_path / "cache" / "models" / "smollm2"
    assert models.prepare("smollm2") == made
    assert len(calls) == 1
    gguf.write_bytes(b"another")
    models.prepare("smollm2")
    assert len(calls) == 2, "a package with another file is converted anew"
    assert [path.name for path in made.parent.iterdir() if path.name.startswith(".")] == []


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"1")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "packaged_gguf", lambda name: gguf)

    def convert(source: Path, target: Path, *rest: object) -> None:
        target.mkdir()
        raise ConfigError("no")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(ConfigError):
        models.prepare("smollm2")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["smollm2.lock"]


PUSH = (
    ("router", "received", 0.0),
    ("router", "dispatched", 0.001),
    ("decode", "allocated", 0.005),
    ("prefill", "queued", 0.010),
    ("decode", "registered", 0.020),
    ("prefill", "computed", 0.110),
    ("prefill", "matched", 0.111),
    ("prefill", "posted", 0.112),
    ("decode", "landed", 0.122),
    ("router", "first_token", 0.150),
    ("router", "last_token", 0.200),
)


def _story(folder: Path, events: tuple[tuple[str, str, float], ...]) -> None:
    for side in {side for side, _, _ in events}:
        story = Story(folder, side)
        for other, event, t in events:
            if other == side:
                story.note("t1", event, t=1000.0 + t)
        story.close()


def test_bars_share_one_axis_and_show_what_ran_side_by_side(tmp_path: Path) -> None:
    _story(tmp_path, PUSH)
    lines = bars(read_story(tmp_path, "t1"), width=150)
    by_label = {line[9:22].strip(): line for line in lines}
    assert list(by_label) == [
        "dispatched", "allocated", "queued", "registered", "prefill", "matched", "posted", "landed",
        "first token", "last token",
    ]  # fmt: skip
    assert by_label["prefill"].endswith("110.0 ms  took 100.0")
    assert by_label["registered"].endswith("20.0 ms  took 15.0")
    assert by_label["allocated"].startswith("  D ") and by_label["posted"].startswith("  P ")
    assert by_label["first token"].startswith("  D ") and by_label["dispatched"].startswith("  router ")
    assert by_label["landed"].endswith("122.0 ms  took 10.0")
    drawn = by_label["prefill"].split("|")[1]
    assert (drawn.index("█"), drawn.count("█")) == (10, 100)
    assert by_label["first token"].split("|")[1].endswith("█"), "the axis ends here"
    assert by_label["last token"].split("|")[1].endswith("→")
    assert {len(line.split("|")[1]) for line in lines} == {150}


def test_bars_name_missing_events(tmp_path: Path) -> None:
    _story(tmp_path, tuple(event for event in PUSH if event[1] not in ("matched", "landed")))
    lines = bars(read_story(tmp_path, "t1"))
    assert lines[-1] == "  not in the story: matched, landed"
    assert len(lines) == len(LABELS) - 2 + 1
    assert bars([]) == [f"  not in the story: {', '.join(LABELS)}"]


def test_bars_of_a_pull_leave_no_gap_and_say_what_moved() -> None:
    steps = "received dispatched queued computed prefill_done allocated registered matched granted posted landed"
    sides = [*["router"] * 2, *["prefill"] * 2, "router", *["decode"] * 2, "prefill", *["decode"] * 3]
    story: list[dict[str, object]] = [
        {"t": number / 1e3, "side": side, "event": event}
        for number, (event, side) in enumerate(zip(steps.split(), sides, strict=True))
    ]
    story[-2] |= {"nbytes": 4_200_000, "descriptors": 61}
    lines = bars(story, PULL_LABELS[:-2])
    assert len(lines) == len(story) - 1
    assert all("took 1.0" in line for line in lines)
    assert lines[-2].startswith("  D      posted ") and lines[-2].endswith(", moved 4.2 MB in 61 descriptors")
    written = [line for line in story if line["event"] != "granted"]
    written[-2] |= {"side": "prefill", "op": "WRITE"}
    lines = bars(written, PULL_LABELS[:-2])
    assert lines[-2].startswith("  P      posted ") and "granted" not in "".join(lines)


def test_stories_of_several_transfers_from_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host, side, t in (("a", "prefill", 2.0), ("b", "decode", 1.0)):
        story = Story(tmp_path / host, side)
        story.note("t1", f"on-{host}", t=t)
        story.close()
    folders = ["--story-dir", str(tmp_path / "a"), "--story-dir", str(tmp_path / "b")]
    assert cli.main(["story", "t1", *folders]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["on-b", "on-a"]
    assert cli.main(["story", "t1,t2", *folders]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("transfer t1\n")
    assert "no story of transfer 't2' in" in shown.err


def test_an_engines_usage_error_is_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    process = ManagedProcess("x", [], {}, log, guard=None)  # type: ignore[arg-type]
    usage = "usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice: 'float99'\n"
    log.write_text(f"INFO starting\n{usage}")
    assert process.cause() == "api_server.py: error: argument --dtype: invalid choice: 'float99'"
    log.write_text(f"{usage}ValueError: no such layer\n")
    assert process.cause() == "ValueError: no such layer"


def test_story_lines_are_in_order_with_distances(tmp_path: Path) -> None:
    _story(tmp_path, PUSH)
    lines = story_lines(read_story(tmp_path, "t1"))
    assert len(lines) == len(PUSH)
    assert lines[5].split() == ["110.0", "ms", "+", "90.0", "prefill", "computed"]


def test_demo_report_parts() -> None:
    table = side_by_side(["colocated", "push"], ["one two three four five six seven", "one"], 50)
    assert table[0].split("|")[0].strip() == "colocated"
    assert table[2].startswith("one two three four five") and table[2].endswith("| one")
    same = [Answer("abc", 1, 2, "")]
    assert differences({"a": same, "b": same}) == []
    assert differences({"a": same, "b": [Answer("abd", 1, 2, "")]}) == [
        "question 1: b differs from a from character 2 on"
    ]
    assert differences({"a": same, "b": [Answer("abcd", 1, 2, "")]}) == [
        "question 1: b differs from a from character 3 on"
    ]
