import json

import pytest

from kvferry.bench import compare, compare_command, evidence, report, workload
from kvferry.bench.compare import Run, Settings, rounds_plan
from kvferry.bench.evidence import Counters, check_answers, check_moved
from kvferry.bench.records import Batch, Sample, Variant, VoidRun
from kvferry.cli import main as cli
from kvferry.errors import ConfigError
from kvferry.launch.cancel import Cancel

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


@pytest.mark.parametrize(("facts", "said"), [({"error": "500: died"}, "died"), ({"tokens": 3}, "3 tokens, 4 were")])
def test_bad_answers_void_the_run(facts, said):
    with pytest.raises(VoidRun, match=said):
        check_answers(Variant("push"), [sample(), sample(1, **facts)], 4, "logs")


NOTHING = Counters(None, None)


@pytest.mark.parametrize(
    ("mode", "facts", "counted", "said"),
    [
        ("push", {"moved_bytes": 10 * KV - 1}, NOTHING, "moved 999 bytes"),
        ("pull", {"moved_bytes": None}, NOTHING, "moved 0 bytes"),
        ("push", {}, Counters(None, 2.0), "computed 2 prompt tokens"),
        ("upstream-push", {}, Counters(10 * KV - 1, 0.0), "moved 999 bytes"),
        ("upstream-pull", {}, NOTHING, "do not tell"),
    ],
)
def test_kv_that_did_not_move_voids_the_run(mode, facts, counted, said):
    with pytest.raises(VoidRun, match=said):
        check_moved(batch(mode, sample(**facts)), counted, KV, "logs")


@pytest.mark.parametrize(
    ("mode", "counted", "moved"),
    [
        ("push", Counters(0.0, 1.0), 10 * KV),
        ("upstream-push", Counters(10 * KV + 5, 1.0), 10 * KV + 5),
        ("upstream-pull", Counters(None, 0.0), None),
        ("colocated", Counters(None, 11.0), 0),
    ],
)
def test_good_runs_pass(mode, counted, moved):
    one = batch(mode, sample())
    check_moved(one, counted, KV, "logs")
    assert one.moved_bytes == moved


def test_story_gives_bytes_and_hooks(tmp_path):
    lines = [
        {"transfer_id": "t0", "side": "prefill", "event": "posted", "nbytes": 600},
        {"transfer_id": "t0", "side": "prefill", "event": "posted", "nbytes": 400},
        {"transfer_id": "t0", "side": "prefill", "event": "hooks", "part": "scheduler", "ms": 0.25},
        {"transfer_id": "t0", "side": "prefill", "event": "hooks", "part": "worker", "ms": 0.5},
        {"transfer_id": "t0", "side": "decode", "event": "hooks", "part": "worker", "ms": 0.125},
        {"transfer_id": "other", "side": "decode", "event": "hooks", "part": "worker", "ms": 9.0},
    ]
    (tmp_path / "prefill-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = sample(moved_bytes=None)
    evidence.add_story(tmp_path, [one])
    assert one.moved_bytes == 1000
    assert one.hooks_ms == {"prefill": 0.75, "decode": 0.125}


METRICS = """
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_sum{engine="0"} 640.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 93.0
"""


def test_counters_of_engines(monkeypatch):
    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            return METRICS.encode()

    monkeypatch.setattr(evidence, "open_json", lambda url, timeout_s: Answer())
    now = evidence.read_counters({"http://p": "prefill", "http://d": "decode"})
    assert now == Counters(1280.0, 7.0)
    assert now.since(Counters(1000.0, None)) == Counters(280.0, 7.0)


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
    assert {"mode", "input_len", "qps", "num", "moved_bytes", "expected_bytes", "hooks_ms", "tuned"} <= push.keys()
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

    def measure(settings, part, facts, state, run, report, cancel):
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
