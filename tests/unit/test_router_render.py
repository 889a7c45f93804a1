"""Pure parts of the router's render tier."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvferry.errors import CompatError, ConfigError
from kvferry.render.settings import Settings
from kvferry.router.config import RouterConfig
from kvferry.router.http.upstream import Upstream
from kvferry.router.render.answers import RenderUnavailable, WorkerLost, facts, opened_of, said_of
from kvferry.router.render.arguments import add_rendering, parse_url, rendering_of
from kvferry.router.render.chunks import Chunks
from kvferry.router.render.history import BLOCK, History
from kvferry.router.render.metrics import RenderMetrics
from kvferry.router.render.settings import Told, fits
from kvferry.router.render.tier import FORGET_S, Tier
from kvferry.router.render.worker import Worker, by_load, own_address
from kvferry.router.replies import LegFailed

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def payload(*ids: int, index: int = 0, end: str | None = None) -> bytes:
    choice = {"index": index, "token_ids": list(ids), "finish_reason": end}
    return json.dumps({"choices": [choice]}, separators=(",", ":")).encode()


def entries(chunks: Chunks, *pieces: bytes) -> list[list]:
    return [json.loads(one) for piece in pieces for one in chunks.take(piece)]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_chunks_are_the_events_however_they_are_cut(end: bytes) -> None:
    stream = (
        b": hello" + end + b"".join(b"data: " + payload(number) + end for number in range(5)) + b"data: [DONE]" + end
    )
    for size in (1, 7, 50, 1000):
        chunks = Chunks(3, 1, "http://d")
        found = entries(chunks, *(stream[at : at + size] for at in range(0, len(stream), size)))
        assert found == [[3, json.loads(payload(number))] for number in range(5)] and chunks.done


def test_the_first_chunk_has_what_prefill_knows() -> None:
    chunks = Chunks(0, 1, "http://d")
    chunks.tell(
        facts({"usage": {"prompt_tokens_details": {"cached_tokens": 16}}, "prompt_logprobs": [None]}, scores=True)
    )
    first, second = entries(chunks, b"data: " + payload(1) + b"\n\ndata: " + payload(2) + b"\n\n")
    assert first[1] == {"num_cached_tokens": 16, "prompt_logprobs": [None], **json.loads(payload(1))}
    assert second[1] == json.loads(payload(2))
    assert facts({"usage": None, "prompt_logprobs": [None]}, scores=False) == {} == facts(None, scores=True)


def test_a_whole_answer_is_one_chunk_and_what_it_says_of_the_prompt_is_prefills() -> None:
    body = json.dumps(
        {
            "choices": [{"index": 0, "token_ids": [1, 2]}],
            "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
            "prompt_logprobs": None,
            "request_id": "x",
        }
    ).encode()
    chunks = Chunks(0, 1, "http://d")
    chunks.tell({"num_cached_tokens": 0, "prompt_logprobs": [None, {}]})
    (entry,) = chunks.whole(body, alone=False)
    found = json.loads(entry)[1]
    assert (found["num_cached_tokens"], found["prompt_logprobs"]) == (0, [None, {}])
    alone = Chunks(0, 1, "http://d")
    assert json.loads(alone.whole(body, alone=True)[0])[1]["num_cached_tokens"] == 2


def test_choices_end_by_themselves_or_by_a_stop_string() -> None:
    chunks = Chunks(0, 2, "http://d")
    entries(chunks, b"data: " + payload(1, index=0, end="length") + b"\n\n")
    assert not chunks.over
    chunks.stop(1)
    assert chunks.over


def test_an_error_event_is_kept_and_told() -> None:
    chunks = Chunks(0, 1, "http://d")
    event = b'{"error":{"message":"out of memory","code":503}}'
    assert chunks.take(b"data: " + event + b"\n\n") == [b"[0," + event + b"]"]
    assert chunks.error is not None and chunks.error.own_status == 503
    with pytest.raises(LegFailed, match="no JSON object"):
        chunks.take(b"data: what\n\n")


def test_a_history_is_packed_and_comes_back_in_order() -> None:
    history, told = History(), []
    for number in range(2000):
        entry = b"[0," + payload(number) + b"]"
        told.append(json.loads(entry))
        history.add([entry])
    bodies = list(history.bodies())
    assert [entry for body in bodies for entry in json.loads(body)] == told
    assert len(bodies) > 5 and max(map(len, bodies)) < 1.1 * BLOCK
    assert history.nbytes < sum(map(len, bodies)) / 4 + BLOCK


def test_a_large_chunk_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def compress(raw: bytes, level: int, real: Callable[[bytes, int], bytes] = zlib.compress) -> bytes:
        packed.append(len(raw))
        return real(raw, level)

    monkeypatch.setattr(zlib, "compress", compress)
    small, large = b"[0," + payload(1) + b"]", b"[1," + payload(*range(10_000)) + b"]"
    assert len(large) > BLOCK
    history = History()
    history.add([small, small, large])
    history.add([small])
    assert list(history.bodies()) == [b"[" + small + b"," + small + b"]", b"[" + large + b"]", b"[" + small + b"]"]
    assert packed == [2 * len(small) + 1]


def test_the_least_loaded_first_equal_ones_in_turn() -> None:
    workers = [Worker(f"http://w{number}") for number in range(3)]
    for worker in workers:
        worker.well()
    workers[0].sessions = 2
    assert [one.url for one in by_load(workers, frozenset(), 0)] == ["http://w1", "http://w2", "http://w0"]
    assert [one.url for one in by_load(workers, frozenset(), 2)] == ["http://w2", "http://w1", "http://w0"]
    workers[2].ill("gone", 1.0)
    assert [one.url for one in by_load(workers, frozenset(), 0)] == ["http://w1", "http://w0"]
    behind = Worker("http://own", door="http://w1")
    behind.well()
    assert workers[1] not in by_load([*workers, behind], frozenset(("http://w1",)), 0)


@pytest.mark.parametrize(
    ("told", "base", "own"),
    [
        ("http://10.0.0.1:9", "http://door:8", "http://10.0.0.1:9"),
        ("http://0.0.0.0:9", "http://door:8", "http://door:9"),
        ("http://[::]:9", "https://[fd00::1]:8", "https://[fd00::1]:9"),
    ],
)
def test_an_address_without_a_host_is_at_the_one_that_was_asked(told: str, base: str, own: str) -> None:
    assert own_address(told, base) == own


def test_answers_that_are_none_of_the_protocol() -> None:
    good = {"X-Kvferry-State": "open", "X-Kvferry-Events": "3", "X-Kvferry-Stop": "0.1,2.0"}
    assert said_of(good, b"x").stopped == [(0, 1), (2, 0)] and said_of(good, b"x").events == 3
    for wrong in ({"X-Kvferry-State": "?"}, {"X-Kvferry-Events": "-1"}, {"X-Kvferry-Stop": "a"}):
        with pytest.raises(WorkerLost):
            said_of(good | wrong, b"")
    for raw in (b"{}", b'{"session":"a/b","worker":"","requests":[{}]}', b'{"session":"a","worker":"","requests":[]}'):
        with pytest.raises(WorkerLost):
            opened_of(raw, "http://w")


def test_settings_that_differ_are_one_line() -> None:
    ours = Settings(tool_call_parser="hermes", max_model_len=10)
    fits(ours, ours, "decode engine http://d")
    with pytest.raises(CompatError) as caught:
        fits(ours, Settings(tool_call_parser="", max_model_len=20), "decode engine http://d")
    said = str(caught.value)
    assert "decode engine http://d: " in said and "tool_call_parser is not set, the render tier's is 'hermes'" in said
    assert "max_model_len is 20, the render tier's is 10" in said and "\n" not in said


def tier_of(count: int) -> tuple[Tier, list[None], Callable[[float], None]]:
    """Without a probe. What was called as changed, and what sets the clock."""
    changes: list[None] = []
    now = [0.0]
    urls = tuple(f"http://w{number}" for number in range(count))
    tier = Tier(
        RouterConfig(prefill=("http://p",), decode=("http://d",), render=urls),
        Upstream(1.0),
        RenderMetrics(CollectorRegistry()),
        lambda: changes.append(None),
        lambda: now[0],
    )
    return tier, changes, lambda time: now.__setitem__(0, time)


HERMES = Told(Settings(model="m", vllm="0.30.0", tool_call_parser="hermes", served_model_names=("a",)))


async def test_workers_that_agree_change_nothing_by_turns() -> None:
    """Another path of the model, another patch release: engines aren't asked again for that."""
    tier, changes, _ = tier_of(2)
    other = Told(msgspec.structs.replace(HERMES.settings, model="/path/of/m", vllm="0.30.1"))
    for _ in range(3):
        tier._learn(tier.workers[0], HERMES)
        tier._learn(tier.workers[1], other)
    assert [one.takes for one in tier.workers] == [True, True]
    assert len(changes) == 1 and tier.settings == HERMES
    more = Told(msgspec.structs.replace(HERMES.settings, served_model_names=("a", "b")))
    tier._learn(tier.workers[1], more)
    assert not tier.workers[1].takes and "served_model_names is ['a', 'b']" in tier.workers[1].reason
    assert len(changes) == 1


MISTRAL = Told(msgspec.structs.replace(HERMES.settings, tool_call_parser="mistral"))


async def test_a_worker_that_is_silent_for_a_moment_still_counts() -> None:
    tier, changes, at = tier_of(2)
    right, wrong = tier.workers
    tier._learn(right, HERMES)
    tier._learn(wrong, MISTRAL)
    tier.suspect(right, "a blip")
    at(FORGET_S)
    tier._learn(wrong, MISTRAL)
    assert not wrong.takes and tier.settings == HERMES
    tier._learn(right, HERMES)
    assert right.takes and len(changes) == 1
    tier.suspect(right, "gone for good")
    at(3 * FORGET_S)
    tier._learn(wrong, MISTRAL)
    assert wrong.takes and tier.settings == MISTRAL and len(changes) == 2


async def test_workers_restarted_one_by_one_with_other_settings_take_over() -> None:
    tier, _, _ = tier_of(2)
    for told in (HERMES, MISTRAL, MISTRAL):
        for worker in tier.workers:
            tier._learn(worker, told)
    assert tier.settings == MISTRAL and all(one.takes for one in tier.workers)
    behind = Worker("http://own", door=tier.workers[0].url)
    behind.settings = HERMES
    behind.ill("killed with its parent", 0.0)
    tier.workers.append(behind)
    tier._learn(tier.workers[0], MISTRAL)
    assert tier.workers[0].takes, "it answers in place of the one behind it"


async def test_no_answer_goes_on_with_other_settings() -> None:
    tier, _, _ = tier_of(1)
    tier._learn(tier.workers[0], MISTRAL)
    with pytest.raises(RenderUnavailable, match="tool_call_parser is 'mistral', that of the worker that began"):
        await tier.open(b"", {}, like=HERMES)


def test_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_rendering(parser)
    args = parser.parse_args(["--render", "http://a:1,http://b:2/", "--render", "https://c"])
    assert rendering_of(args)["render"] == ("http://a:1", "http://b:2", "https://c")
    for wrong in ("a:1", "ftp://a", "http://", "http://u:p@a", "http://a:99999"):
        with pytest.raises(ConfigError, match="--render"):
            parse_url(wrong)


def test_every_metric_is_documented() -> None:
    metrics, page = RenderMetrics(CollectorRegistry()), PAGE.read_text()
    families = {family.name: family.type for family in metrics.registry.collect()}
    assert len(families) == 7
    for name, kind in families.items():
        full = name + ("_total" if kind == "counter" else "")
        assert f"| `{full}` | {kind} |" in page, full
