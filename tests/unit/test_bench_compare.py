import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.bench import compare, compare_command, report, witness, workload
from kvferry.bench.compare import Run, Settings, rounds_plan
from kvferry.bench.kv import KvFacts
from kvferry.bench.records import Batch, Sample, Variant, VoidRun
from kvferry.bench.watch import Watch
from kvferry.cli import main as cli
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel
from kvferry.launch.process import ProcessDied
from kvferry.launch.spec import mode_named
from kvferry.launch.state import StateDir
from kvferry.story import Story

KV = 100


def order(modes, rounds, **options):
    return [(p.variant.mode, p.round) for p in rounds_plan(Settings(modes, rounds=rounds, **options))]


def test_rounds_are_reversed_and_rotated():
    letters = "".join(mode for mode, _ in order(["A", "B", "C"], 4))
    assert letters == "ABCCBABCAACB"
    assert [number for _, number in order(["A", "B"], 2)] == [0, 0, 1, 1]


def test_each_mode_gets_every_prompt_once():
    plan = rounds_plan(Settings(["A", "B"], num=11, rounds=3, input_lens=(500, 100)))
    for mode in "AB":
        mine = [part for part in plan if part.variant.mode == mode]
        assert sorted(i for part in mine for i in part.indexes) == list(range(11))
        assert [part.first_len for part in mine] == [500, 100, 500]


def test_as_shipped_comes_last_and_once():
    plan = rounds_plan(Settings(["A"], as_shipped=["A"], as_shipped_num=3, rounds=2))
    assert [(part.variant.tuned, len(part.indexes)) for part in plan] == [(True, 5), (True, 5), (False, 3)]


@pytest.fixture
def model(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 50, "eos_token_id": [2, 3]}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 49}, {"id": 0}]}))
    return tmp_path


def test_facts_of_a_model(model):
    facts = workload.model_facts(model, "bfloat16")
    assert facts.kv_bytes == 2 * 2 * 2 * 8 * 2
    assert set(facts.token_ids) == set(range(50)) - {0, 2, 3, 49}
    assert workload.model_facts(model, "float32").kv_bytes == 2 * facts.kv_bytes
    assert workload.model_facts(model, "bfloat16", ["--kv-cache-dtype=fp8"]).kv_bytes == facts.kv_bytes // 2


def test_unknown_kv_is_refused(model):
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "kv_lora_rank": 512}))
    with pytest.raises(ConfigError, match="KV size"):
        workload.model_facts(model, "bfloat16")


def test_prompts_repeat_by_seed_and_differ_by_index(model):
    facts = workload.model_facts(model, "bfloat16")
    prompts = [workload.prompt(facts, 1, 40, index) for index in range(20)]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert prompts[3] == workload.prompt(facts, 1, 40, 3) != workload.prompt(facts, 2, 40, 3)
    assert not {0, 2, 3, 49} & {token for prompt in prompts for token in prompt}


def test_send_times():
    assert workload.send_times(3, 2.0, "constant", 0) == [0.0, 0.5, 1.0]
    times = workload.send_times(4000, 10.0, "poisson", 1)
    assert times == sorted(times) == workload.send_times(4000, 10.0, "poisson", 1)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(400, rel=0.1)


def sample(index=0, **facts):
    made = Sample(index, 11, transfer_id=f"t{index}", ttft_ms=100.0, e2e_ms=130.0, itl_ms=[10.0] * 3, first_tokens=1)
    made.tokens, made.text, made.moved_bytes = 4, "x", 10 * KV
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def batch(mode, *samples, number=0):
    return Batch(Variant(mode), 11, number, list(samples), first=sample(1_000_000))


def told(deployment, transfer_id, *events):
    """Written to the deployment's stories."""
    for side, event, facts in events:
        story = Story(deployment.state_dir.story, side)
        story.note(transfer_id, event, **facts)
        story.close()


POSTED = ("prefill", "posted", {"nbytes": 16 * KV, "descriptors": 2})


class Stub:
    """In a deployment's place: nothing runs. `metrics`: what its one engine tells."""

    def __init__(self, spec, report=None, cancel=None):
        self.mode = mode_named(spec.mode)
        self.state_dir = StateDir(Path(spec.state_dir))
        self.state_dir.story.mkdir(parents=True, exist_ok=True)
        self.engines = [SimpleNamespace(url="http://d", role="decode" if self.mode.split else "colocated")]
        self.ended = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.mode.split:
            told(self, "t0", ("decode", "hooks", {"part": "worker", "ms": 0.5}))

    def dead(self):
        return self.ended


@pytest.fixture
def metrics(monkeypatch):
    """To be filled by name."""
    found = {}
    monkeypatch.setattr(witness, "engine_metrics", lambda url: [(name, {}, value) for name, value in found.items()])
    monkeypatch.setattr(witness, "SETTLE_S", 0.0)
    return found


@pytest.fixture
def watched(metrics, tmp_path):
    def made(mode="push"):
        deployment = Stub(SimpleNamespace(mode=mode, state_dir=tmp_path))
        return deployment, Watch(deployment, f"{mode} as shipped", KvFacts(KV, 16))

    return made


def test_what_was_asked_is_held_to_it(watched):
    deployment, watch = watched()
    told(deployment, "t0", POSTED, ("prefill", "hooks", {"ms": 0.25}), ("prefill", "hooks", {"ms": 0.5}))
    samples, moved = watch.asked(lambda: [sample()], 1, 11, 4)
    watch.check_engines()
    assert (moved, samples[0].moved_bytes) == (16 * KV, 16 * KV)
    told(deployment, "t0", ("decode", "hooks", {"ms": 0.125}))
    watch.add_hooks(samples)
    assert samples[0].hooks_ms == {"prefill": 0.75, "decode": 0.125}


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (
            [sample(), sample(1, error="500: died")],
            "1 of 2 requests failed, the first: 500: died, in request 1 (transfer",
        ),
        ([sample(error="500: died")], "1 of 1 requests failed"),
        ([sample(), sample(1, tokens=3)], "1 answers have not the 4 tokens asked for, the first has 3"),
        ([sample(), sample(1)], "request 1 (transfer t1) has no story"),
    ],
)
def test_what_was_not_done_voids_the_run_and_names_the_logs(samples, said, watched):
    deployment, watch = watched()
    told(deployment, "t0", POSTED)
    with pytest.raises(VoidRun) as void:
        watch.asked(lambda: samples, 2, 11, 4)
    assert void.value.message.startswith("push as shipped, 11-token prompts: ")
    assert said in void.value.message
    assert void.value.hint == f"logs: {deployment.state_dir.logs}"


@pytest.mark.parametrize("short", [0, 1])
def test_vllms_connectors_are_judged_by_what_they_count(short, watched, metrics):
    name = "vllm:nixl_bytes_transferred_sum"
    metrics[name] = 700.0
    _, watch = watched("upstream-push")

    def ask():
        metrics[name] += 10 * KV - short
        return [sample(moved_bytes=None)]

    if short:
        with pytest.raises(VoidRun, match="999 bytes were moved, the prompts' KV has 1000"):
            watch.asked(ask, 1, 11, 4)
        return
    samples, moved = watch.asked(ask, 1, 11, 4)
    assert (moved, samples[0].moved_bytes) == (10 * KV, None)


def test_metrics_that_do_not_tell_void_the_run(watched):
    _, watch = watched("upstream-pull")
    with pytest.raises(VoidRun, match="nothing tells whether KV moved"):
        watch.asked(lambda: [sample()], 1, 11, 4)


def test_nothing_moves_in_one_engine(watched):
    samples, moved = watched("colocated")[1].asked(lambda: [sample()], 1, 11, 4)
    assert (moved, samples[0].moved_bytes) == (0, 0)


def test_an_engine_that_overran_its_model_voids_the_start(watched, metrics):
    metrics["kvferry_engine_late_seconds_total"] = 1.0
    _, watch = watched()
    watch.check_engines()
    metrics["kvferry_engine_late_seconds_total"] = 61.0
    with pytest.raises(VoidRun, match="overran its timing model by 60"):
        watch.check_engines()


def test_a_process_that_ended_is_the_reason(watched):
    deployment, watch = watched()
    deployment.ended = [SimpleNamespace(died=lambda when: ProcessDied(f"decode-0 ended {when}"))]
    with pytest.raises(ProcessDied, match="decode-0 ended while it was measured"):
        watch.asked(lambda: [sample(error="502")], 1, 11, 4)


def test_a_comparison_from_start_to_json(metrics, tmp_path, monkeypatch):
    def ask(settings, deployment, prompts, qps, report, cancel):
        for index, tokens in prompts:
            assert len(tokens) == 11
            told(deployment, f"t{index}", ("prefill", "posted", {"nbytes": 16 * 128, "descriptors": 2}))
        return [sample(index) for index, _ in prompts]

    monkeypatch.setattr(compare, "Deployment", Stub)
    monkeypatch.setattr(compare, "_ask", ask)
    settings = Settings(
        ["push", "colocated"], engine="sim", profile="instant", input_lens=(11,), output_tokens=4, num=3, rounds=1
    )
    facts = report.facts_of(settings, compare.compare(settings, tmp_path, lambda line: None, Cancel()))
    push, plain = facts["results"]
    assert (push["engine"], push["num"], push["starts"]) == ("sim", 3, 1)
    assert (push["moved_bytes"], push["expected_bytes"]) == (3 * 16 * 128, 3 * 10 * 128)
    assert (plain["moved_bytes"], plain["expected_bytes"], plain["hooks_ms"]) == (0, 0, None)
    assert [one["index"] for one in push["samples"]] == [0, 1, 2]
    assert [one["index"] for one in push["first_samples"]] == [compare.FIRST]
    assert push["first_samples"][0]["moved_bytes"] == 16 * 128
    assert push["samples"][0]["hooks_ms"] == {"decode": 0.5}
    assert {line["met"] for line in [*facts["ratios"], *facts["hooks"]]} == {None}
    assert "not judged: the bound is for real vLLM engines, this engine's time is modelled" in report.text(facts)


@pytest.fixture
def facts():
    settings = Settings(["push", "colocated"], as_shipped=["push"], input_lens=(11,), output_tokens=4, num=2)
    shipped = Batch(Variant("push", False), 11, 0, [sample()], moved_bytes=10 * KV)
    batches = []
    for number in range(2):
        push = batch("push", sample(number, hooks_ms={"prefill": 0.5, "decode": 0.25}), number=number)
        push.moved_bytes = 12 * KV
        plain = batch("colocated", sample(number), number=number)
        plain.moved_bytes = 0
        batches += [push, plain]
    return report.facts_of(settings, Run(KV, [*batches, shipped], [{"loadavg_1m_before": 0.1}]))


def test_json_keys(facts):
    push, plain = facts["results"]
    assert {
        "mode",
        "engine",
        "input_len",
        "qps",
        "num",
        "moved_bytes",
        "expected_bytes",
        "hooks_ms",
        "tuned",
    } <= push.keys()
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "first_ttft_ms"):
        assert {"mean", "p50", "p90", "p99"} <= push[metric].keys()
    assert (push["mode"], push["num"], push["qps"], push["tuned"]) == ("push", 2, None, True)
    assert (push["moved_bytes"], push["expected_bytes"]) == (24 * KV, 20 * KV)
    assert (plain["moved_bytes"], plain["expected_bytes"], plain["hooks_ms"]) == (0, 0, None)
    assert push["hooks_ms"]["prefill"]["p50"] == 0.5
    assert [one["round"] for one in push["samples"]] == [0, 1]
    assert [entry["tuned"] for entry in facts["as_shipped"]] == [False]
    about = facts["environment"]
    assert {"cpu_model", "cores", "vllm", "torch", "nixl", "kvferry", "python", "seed", "date"} <= about.keys()
    assert {line["name"] for line in facts["ratios"]} == {"push/colocated", "push first/later"}
    json.dumps(facts)


def test_tables_say_the_same(facts, tmp_path):
    shown, marked = report.text(facts), report.markdown(facts)
    for text in (shown, marked):
        assert "push (as shipped)" in text
        assert "TTFT push/colocated" in text
        assert "not judged: the bound is for 500-token prompts" in text
        assert "<= 1.15" in text
    assert sum(line.startswith("|---|") for line in marked.splitlines()) == 2
    report.write_json(tmp_path / "sub" / "f.json", facts)
    assert json.loads((tmp_path / "sub" / "f.json").read_text())["results"]


def test_only_as_shipped_modes_may_fail(model, tmp_path, monkeypatch):
    tried = []

    def measure(settings, part, kv, words, state, run, report, cancel):
        tried.append(state.name)
        if part.variant.mode == "upstream-push":
            raise VoidRun("handshake", hint="x")

    monkeypatch.setattr(compare, "_measure", measure)
    settings = Settings(["push"], as_shipped=["upstream-push", "upstream-pull"], model=str(model), rounds=1)
    run = compare.compare(settings, tmp_path, lambda line: None, Cancel())
    names = ["01-push", "02-upstream-push-as-shipped-1", "02-upstream-push-as-shipped-2"]
    assert tried == [*names, "03-upstream-pull-as-shipped-1"]
    assert [line["attempt"] for line in run.failures] == [1, 2]
    with pytest.raises(VoidRun):
        compare.compare(Settings(["upstream-push"], model=str(model)), tmp_path, lambda line: None, Cancel())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--modes", "psh"], "did you mean 'push'"),
        (["--modes", "push,push"], "named twice"),
        (["--num", "1", "--rounds", "2"], "cannot be spread"),
        (["--output-tokens", "1"], "at least 2"),
        (["--qps", "0"], "not above 0"),
        (["--engine", "vlm"], "engine"),
        (["--vllm-arg=--port=1"], "set by kvferry"),
        (["--profile", "instant"], "is for --engine sim"),
        (["--engine", "sim", "--modes", "push,upstream-push"], "'upstream-push' needs vLLM engines"),
        (["--engine", "sim", "--as-shipped", "push"], "no such variant"),
        (["--engine", "sim", "--require"], "--require: no bound is judged for engine sim"),
    ],
)
def test_bad_arguments_are_one_line(args, said, capsys):
    assert cli(["bench", "compare", *args]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_void_run_exits_1_and_writes_nothing(monkeypatch, tmp_path, capsys):
    def void(*_):
        raise VoidRun("push: request 0 failed: 500", hint="logs: here")

    monkeypatch.setattr(compare_command, "compare", void)
    monkeypatch.setattr(compare_command.Cancel, "catch_signals", lambda self: None)
    out = tmp_path / "out.json"
    assert cli(["bench", "compare", "--state-dir", str(tmp_path / "s"), "--json", str(out)]) == 1
    assert "kvferry: error: push: request 0 failed: 500 (logs: here)" in capsys.readouterr().err
    assert not out.exists()
