import numpy as np
import pytest

from kvferry.bench.stats import ratio_of_medians, summary
from kvferry.bench.verdict import hook_verdicts, ratios


def test_percentiles_are_numpys():
    values = [float(v) for v in np.random.default_rng(1).exponential(100, 57)]
    got = summary(values, digits=9)
    assert got["n"] == 57
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert got[name] == pytest.approx(np.percentile(values, q))
    assert got["mean"] == pytest.approx(np.mean(values))
    assert (got["min"], got["max"]) == (pytest.approx(min(values)), pytest.approx(max(values)))


def test_summary_of_nothing_and_of_one():
    assert summary([])["p50"] is None
    assert summary([])["n"] == 0
    one = summary([4.0])
    assert one["p50"] == one["p99"] == one["mean"] == 4.0


def test_ratio_of_constants_has_no_width():
    ratio = ratio_of_medians([2.0] * 5, [4.0] * 7)
    assert (ratio.value, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_interval_is_repeatable_and_holds_the_true_ratio():
    held = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        a = [float(v) for v in random.normal(80, 8, 30)]
        b = [float(v) for v in random.normal(100, 10, 30)]
        ratio = ratio_of_medians(a, b, seed=seed, resamples=2000)
        assert ratio == ratio_of_medians(a, b, seed=seed, resamples=2000)
        assert ratio.low <= ratio.value <= ratio.high
        held += ratio.low <= 0.8 <= ratio.high
    assert held >= 34  # 95% wanted; fewer than 85% would be a wrong interval, not chance


def test_interval_narrows_with_more_samples():
    random = np.random.default_rng(5)
    few, many = random.normal(100, 10, 8), random.normal(100, 10, 800)
    narrow = ratio_of_medians(list(many), list(many), resamples=2000)
    wide = ratio_of_medians(list(few), list(few), resamples=2000)
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3


def test_a_ratio_needs_both_sides():
    with pytest.raises(ValueError):
        ratio_of_medians([], [1.0])


def entry(mode, ttft, *, engine="vllm", num=10, input_len=500, qps=None, first=(), hooks=None):
    samples = [{"ttft_ms": ttft, "tpot_ms": 10.0}] * num
    return {
        "mode": mode,
        "engine": engine,
        "input_len": input_len,
        "qps": qps,
        "num": num,
        "ttft_ms": {"p50": ttft},
        "samples": samples,
        "first_samples": [{"ttft_ms": value} for value in first],
        "hooks_ms": hooks,
    }


def verdict(results, name, metric="ttft_ms"):
    return next(line for line in ratios(results, 0) if (line["name"], line["metric"]) == (name, metric))


def test_bounds_are_judged_by_what_was_measured():
    fast = [entry("push", 94.0), entry("upstream-push", 100.0)]
    slow = [entry("push", 96.0), entry("upstream-push", 100.0)]
    assert verdict(fast, "push/upstream-push")["met"] is True
    assert verdict(slow, "push/upstream-push")["met"] is False
    assert verdict(slow, "push/upstream-push", "tpot_ms")["met"] is True


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num": 9}, "10 requests"),
        ({"input_len": 300}, "500-token"),
        ({"qps": 1.0}, "at a time"),
        ({"engine": "sim"}, "real vLLM engines"),
    ],
)
def test_other_conditions_are_not_judged(changed, why):
    line = verdict([entry("push", 1.0, **changed), entry("upstream-push", 100.0, **changed)], "push/upstream-push")
    assert line["met"] is None
    assert why in line["why"]


def test_first_against_later():
    line = verdict([entry("push", 100.0, first=(120.0, 190.0))], "push first/later")
    assert line["value"] == pytest.approx(1.55)
    assert line["worst"] == pytest.approx(1.9)
    assert line["met"] is False


def test_hooks_must_stay_below_their_bound():
    stats = {"prefill": {"p50": 0.4}, "decode": {"p50": 1.0}}
    met = {line["name"]: line["met"] for line in hook_verdicts([entry("push", 1.0, hooks=stats)])}
    assert met == {"push hooks, prefill": True, "push hooks, decode": False}
    [*sim] = hook_verdicts([entry("push", 1.0, hooks=stats, engine="sim")])
    assert [line["met"] for line in sim] == [None, None]
