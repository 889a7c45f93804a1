"""What other load generators wrote, read back; which one is taken; vLLM's schedule without waiting."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_parts import job

from kvferry.bench import load, load_aiperf, load_vllm, vllm_serve, workload
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel


def vllm_result(**other: Any) -> dict[str, Any]:
    return {
        "duration": 1.5,
        "start_times": [100.25, 100.5],
        "ttfts": [0.1, 0.2],
        "itls": [[0.01, 0.03], [0.02, 0.02]],
        "input_lens": [41, 41],
        "output_lens": [3, 3],
        "errors": ["", ""],
        "generated_texts": ["long", "text"],
        **other,
    }


NOTES = {"begun": 100.0, "due": [0.248, 0.497], "warm_ups": 2}


def test_vllms_result_becomes_samples() -> None:
    run = load_vllm.load_run(vllm_result(), NOTES, ["cmd"], ["a0", "a1"])
    first, second = run.samples
    assert (first.ttft_ms, first.itl_ms, first.tokens) == (100.0, [10.0, 30.0], 3)
    assert first.tpot_ms == pytest.approx(20.0)
    assert first.lag_ms == pytest.approx(2.0) and second.lag_ms == pytest.approx(3.0)
    assert run.starts_s == [0.0, 0.25]
    assert (run.warm_ups, run.duration_s, run.request_ids) == (2, 1.5, ["a0", "a1"])
    assert run.raw is not None and "generated_texts" not in run.raw


def test_failures_in_vllms_result() -> None:
    result = vllm_result(errors=["Traceback\n  File x\nOSError: gone\n", ""], ttfts=[0.0, 0.0], output_lens=[0, 0])
    run = load_vllm.load_run(result, NOTES, [], [])
    assert [sample.error for sample in run.samples] == ["OSError: gone", "no answer"]


@pytest.mark.parametrize("notes", [{**NOTES, "due": [0.2]}, {**NOTES, "due": [], "begun": None}])
def test_without_due_times_lateness_is_unknown(notes: dict[str, Any]) -> None:
    assert load_vllm.load_run(vllm_result(), notes, [], []).lag_source == ""


def test_vllms_command_has_the_published_flags() -> None:
    asked = job(qps=4.0, num=50, arrival="constant", tokenizer=Path("/m"), seed=7)
    line = " ".join(load_vllm.VllmLoad().command(asked, Path("/tmp/x"), "p-"))
    for part in (
        "--dataset-name random --random-input-len 41 --random-output-len 4",
        "--num-prompts 50 --request-rate 4",
        "--burstiness inf",
        "--num-warmups 2 --seed 7 --temperature 0 --ignore-eos",
        "--save-result --save-detailed",
    ):
        assert part in line


def test_vllms_command_for_token_ids_reads_a_trace_of_different_prompts(tmp_path: Path) -> None:
    asked = job(qps=4.0, num=50, tokenizer=Path("/m"), seed=7, prompts="ids")
    load_vllm.write_trace(asked, tmp_path / load_vllm.TRACE)
    lines = [json.loads(line) for line in (tmp_path / load_vllm.TRACE).read_text().splitlines()]
    assert {(line["input_length"], line["output_length"]) for line in lines} == {(41, 4)}
    assert len({tuple(line["hash_ids"]) for line in lines}) == 50
    line = " ".join(load_vllm.VllmLoad().command(asked, tmp_path, "p-"))
    assert f"--dataset-name timed_trace --dataset-path {tmp_path}/{load_vllm.TRACE} --no-self-timed" in line
    assert "--timed-trace-chunk-hash-size 41" in line and "--random-input-len" not in line


def serve_module(delays: list[float]) -> Any:
    """A module with vLLM's scheduling in small."""
    module = SimpleNamespace(time=time, asyncio=asyncio, ASYNC_REQUEST_FUNCS={})

    async def get_request(requests: list[int], rate: float) -> Any:
        drawn = [gap * float(np.random.uniform(1, 1)) for gap in delays]
        start = module.time.time()
        for request, gap in zip(requests, np.cumsum(drawn), strict=True):
            left = start + gap - module.time.time()
            if left > 0:
                await module.asyncio.sleep(left)
            yield request, rate

    module.get_request = get_request
    return module


def test_due_times_come_from_its_own_schedule_and_cost_no_time() -> None:
    module = serve_module([5.0, 100.0, 0.0])
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    begun = time.monotonic()
    due = asyncio.run(vllm_serve.due_times(module, module.get_request, ([1, 2, 3], 1.0), {}))
    assert due == [5.0, 105.0, 105.0]
    assert time.monotonic() - begun < 2
    assert np.random.get_state()[1].tolist() == before  # type: ignore[union-attr]
    assert (module.time, module.asyncio) == (time, asyncio)


def test_warm_ups_that_went_well_are_counted() -> None:
    module = serve_module([0.0, 0.001])
    answers = iter([True, False, True, True, True])

    async def ask() -> Any:
        return SimpleNamespace(success=next(answers))

    module.ASYNC_REQUEST_FUNCS["openai"] = ask
    notes = vllm_serve.watch(module, "openai")

    async def drive() -> None:
        for _ in range(3):
            await module.ASYNC_REQUEST_FUNCS["openai"]()
        async for _ in module.get_request([1, 2], 1.0):
            await module.ASYNC_REQUEST_FUNCS["openai"]()

    asyncio.run(drive())
    assert notes["warm_ups"] == 2
    assert notes["due"] == pytest.approx([0.0, 0.001])
    assert notes["begun"] is not None


def aiperf_line(start_s: float, **metrics: Any) -> dict[str, Any]:
    told = {"time_to_first_token": 100.0, "inter_chunk_latency": [10.0, 30.0], "output_sequence_length": 3}
    return {
        "metadata": {"request_start_ns": int(start_s * 1e9), "x_request_id": f"x{start_s:g}"},
        "metrics": {name: {"value": value} for name, value in {**told, "usage_prompt_tokens": 41, **metrics}.items()},
    }


def test_aiperfs_records_become_samples() -> None:
    lines = [aiperf_line(50.253), aiperf_line(50.001), {**aiperf_line(50.51), "error": {"message": "gone"}}]
    run = load_aiperf.load_run(lines, [0.0, 0.25, 0.5], job(), 2, [])
    assert run.request_ids == ["x50.001", "x50.253", "x50.51"]
    assert [sample.error for sample in run.samples] == ["", "", "gone"]
    assert run.samples[0].tpot_ms == pytest.approx(20.0)
    assert [sample.lag_ms for sample in run.samples] == pytest.approx([0.0, 2.0, 9.0], abs=1e-3)
    assert "most punctual" in run.lag_source


def test_a_record_that_is_cut_off_is_none(tmp_path: Path) -> None:
    path = tmp_path / load_aiperf.RECORDS
    assert load_aiperf.read_records(path) == []
    path.write_text(json.dumps(aiperf_line(50.0)) + '\n{"metadata": {"request_st')
    assert len(load_aiperf.read_records(path)) == 1


@pytest.mark.parametrize(("there", "broken"), [(3, ""), (2, "ended with 1, with 2 of 3"), (0, "ended with 1, with 0")])
def test_how_aiperf_ended_is_told_where_records_are_missing(
    there: int, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: list[str], *args: Any, **kwargs: Any) -> str:
        folder = Path(argv[argv.index("--output-artifact-dir") + 1])
        lines = [aiperf_line(50.0 + index) for index in range(there)]
        (folder / load_aiperf.RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "ended with 1"

    monkeypatch.setattr(load_aiperf.external, "run", run)
    monkeypatch.setattr(load_aiperf, "warm_up", lambda job, cancel: 2)
    found = load_aiperf.AiperfLoad().run(job(num=3, tokenizer=tmp_path), Cancel(), lambda line: None)
    assert len(found.samples) == (there if not broken else 0)
    assert found.broken.startswith(broken)
    assert bool(found.broken) == bool(broken)


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_asked_for_is_the_rate_that_is_sent(seed: int) -> None:
    """Drawn as they come, 40 gaps would be off by 16%: a point would be named by a rate that it had not."""
    due = workload.send_times(41, 8.0, "poisson", seed)
    gaps = np.diff(due)
    assert due[0] == 0.0
    assert due[-1] == pytest.approx(5.0)
    assert 0.5 < np.std(gaps) * 8.0 < 1.6, "exponential: as wide as its mean"
    assert workload.send_times(1, 8.0, "poisson", seed) == [0.0]
    assert workload.send_times(0, 8.0, "poisson", seed) == []


def test_aiperf_gets_our_prompts_at_our_times() -> None:
    lines = load_aiperf._schedule(job(), [0.0, 0.4])
    assert [line["timestamp"] for line in lines] == [0.0, 400.0]
    assert [len(line["payload"]["prompt"]) for line in lines] == [41, 41]
    assert lines[0]["payload"]["prompt"] != lines[1]["payload"]["prompt"]


@pytest.mark.parametrize(
    ("there", "asked", "taken"),
    [
        ({"vllm", "aiperf"}, "auto", "vllm"),
        ({"aiperf"}, "auto", "aiperf"),
        ({"vllm"}, "builtin", "builtin"),
        ({"vllm", "aiperf"}, "aiperf", "aiperf"),
    ],
)
def test_which_generator(monkeypatch: pytest.MonkeyPatch, there: set[str], asked: str, taken: str) -> None:
    monkeypatch.setattr(load, "_installed", lambda package: package in there)
    assert load.choose(asked).name == taken


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("auto", r"no load generator is installed .*kvferry\[load\].*--load builtin"),
        ("vllm", "vllm is not installed"),
        ("aiperf", "aiperf is not installed"),
        ("bulitin", "did you mean 'builtin'"),
    ],
)
def test_a_generator_that_is_not_there(monkeypatch: pytest.MonkeyPatch, asked: str, said: str) -> None:
    monkeypatch.setattr(load, "_installed", lambda package: False)
    with pytest.raises(ConfigError, match=said):
        load.choose(asked)


def test_reading_their_results_loads_neither() -> None:
    assert "aiperf" not in sys.modules
