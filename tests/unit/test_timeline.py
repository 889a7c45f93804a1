"""The story of a stream: chunks that repeat, what is put together and what the bars show of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry import cli
from kvferry.launch.chunks import gathered, streamed
from kvferry.launch.timeline import PULL_LABELS, STREAM_LABELS, actor, bars, spans, story_lines
from kvferry.story import Story, read_story


def line(t_ms: float, side: str, event: str, **facts: Any) -> dict[str, Any]:
    return {"t": 1000.0 + t_ms / 1e3, "transfer_id": "t1", "side": side, "rank": 0, "event": event, **facts}


def posted(t_ms: float, nbytes: int = 1000, **more: Any) -> dict[str, Any]:
    facts = {"op": "WRITE", "descriptors": 4, "nbytes": nbytes, "plan_ms": 0.1, "post_ms": t_ms / 100}
    return line(t_ms, "prefill", "posted", **facts) | more


def written(t_ms: float, nbytes: int = 1000, wire_ms: float = 2.0) -> dict[str, Any]:
    return line(t_ms, "prefill", "written", nbytes=nbytes, wire_ms=wire_ms)


EARLY = [
    line(0, "router", "received"),
    line(1, "router", "dispatched", mode="stream"),
    line(5, "decode", "allocated"),
    line(10, "prefill", "queued"),
    line(20, "decode", "registered"),
    line(21, "prefill", "held"),
    line(30, "prefill", "matched"),
    posted(30),
    written(32),
    posted(50),
    written(53, wire_ms=3.0),
    posted(70),
    line(90, "prefill", "computed"),
    line(90, "prefill", "sealed"),
    posted(91, 500),
    written(92),
    written(95, 500),
    line(96, "decode", "landed"),
    line(120, "router", "first_token"),
    line(150, "router", "last_token"),
]


def test_chunks_between_two_events_share_a_line() -> None:
    lines = story_lines(EARLY)
    told = [" ".join(text[36:].split()) for text in lines if "posted" in text or "written" in text]
    assert told == [
        "posted chunks=1..3 for_ms=40.0 op=WRITE descriptors=12 nbytes=3000 plan_ms=0.1..0.1 post_ms=0.3..0.7",
        "written chunks=1..2 for_ms=21.0 nbytes=2000 wire_ms=2.0..3.0",
        "posted chunk=4 op=WRITE descriptors=4 nbytes=500 plan_ms=0.1 post_ms=0.91",
        "written chunks=3..4 for_ms=3.0 nbytes=1500 wire_ms=2.0..2.0",
    ]
    assert len(lines) == len(EARLY) - 4
    assert [float(text.split()[0]) for text in lines] == sorted(float(text.split()[0]) for text in lines)


def test_each_rank_counts_its_own_chunks() -> None:
    story = [line(1, "router", "dispatched", mode="stream"), posted(2), posted(3, rank=1), posted(4), posted(5, rank=1)]
    told = [(one["rank"], one["chunks"], one["nbytes"]) for one in gathered(story) if one["event"] == "posted"]
    assert told == [(0, "1..2", 2000), (1, "1..2", 2000)]


def test_every_chunk_has_its_line_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("router", "prefill", "decode"):
        story = Story(tmp_path, side)
        for one in EARLY:
            if one["side"] == side:
                facts = {key: value for key, value in one.items() if key not in ("transfer_id", "side", "rank")}
                story.note("t1", **facts)
        story.close()
    assert cli.main(["story", "t1", "--story-dir", str(tmp_path), "--every"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EARLY)
    assert cli.main(["story", "t1", "--story-dir", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(story_lines(read_story(tmp_path, "t1"))) == len(EARLY) - 4


def test_what_is_no_stream_stays_as_it_is() -> None:
    story = [one | {"mode": "push"} for one in EARLY if one["event"] != "sealed"]
    assert not streamed(story) and len(story_lines(story)) == len(story)
    assert "posted" in {label for label, *_ in spans(story, PULL_LABELS)}


def steps_of(story: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Label -> begin and end, in milliseconds since the request came."""
    found = spans(story, PULL_LABELS)
    return {label: (round((a - 1000) * 1e3, 3), round((b - 1000) * 1e3, 3)) for label, _, a, b in found}


def test_the_span_of_the_chunks_and_what_was_not_hidden_behind_prefill() -> None:
    steps = steps_of(EARLY)
    assert steps["prefill"] == (10, 90) and steps["matched"] == (20, 30)
    assert steps["chunks"] == (30, 95), "from the first post to the end of the last WRITE"
    assert steps["landed"] == (90, 96), "the exposed part: since prefill was done"
    assert "posted" not in steps and "rewound" not in steps and "bound" not in steps
    assert actor(EARLY, "written") == "P"


def test_bars_of_a_stream() -> None:
    lines = bars(EARLY, STREAM_LABELS, width=120)
    by_label = {text[9:22].strip(): text for text in lines}
    assert list(by_label) == [
        "dispatched", "allocated", "queued", "registered", "matched", "prefill", "chunks", "landed", "first token",
        "last token",
    ]  # fmt: skip
    share = round(100 * 3000 / 3500)
    said = f"took 65.0, moved 0.0 MB in 16 descriptors and 4 chunks, {share}% before prefill was done"
    assert by_label["chunks"].endswith(said) and by_label["chunks"].startswith("  P ")
    drawn = by_label["chunks"].split("|")[1]
    assert (drawn.index("█"), drawn.count("█")) == (30, 65)
    assert by_label["landed"].split("|")[1].index("█") == 90
    cut = [one for one in EARLY if one["event"] not in ("written", "landed")]
    assert bars(cut, STREAM_LABELS)[-1] == "  not in the story: chunks, landed"


def test_a_prompt_that_was_preempted_began_anew() -> None:
    story = [
        line(0, "router", "received"),
        line(10, "prefill", "queued"),
        line(20, "prefill", "matched"),
        posted(20),
        line(25, "prefill", "rewound"),
        written(26),
        posted(40),
        line(45, "prefill", "rewound"),
        posted(70),
        written(72),
        line(80, "prefill", "computed"),
        line(81, "prefill", "sealed"),
        line(82, "decode", "landed"),
    ]
    steps = steps_of(story)
    assert steps["rewound"] == (10, 45) and steps["prefill"] == (45, 80)
    assert steps["chunks"] == (20, 72) and steps["landed"] == (80, 82)


def test_a_decode_engine_that_was_bound_late() -> None:
    story = [
        line(0, "router", "received"),
        line(1, "router", "dispatched", mode="stream", bind="late"),
        line(10, "prefill", "queued"),
        line(60, "prefill", "computed"),
        line(62, "router", "prefill_done"),
        line(63, "router", "bound", decode="http://d"),
        line(65, "decode", "allocated"),
        line(66, "decode", "registered"),
        line(67, "prefill", "matched"),
        posted(68),
        line(69, "prefill", "sealed"),
        written(75),
        line(76, "decode", "landed"),
    ]
    steps = steps_of(story)
    assert steps["bound"] == (62, 63) and steps["allocated"] == (63, 65) and steps["landed"] == (68, 76)
    assert any("0% before prefill was done" in text for text in bars(story, STREAM_LABELS))
