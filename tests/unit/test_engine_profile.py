"""Profiles: strict, each number with its source, and the step's duration by the stated formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.engine.profile import load, shipped
from kvferry.errors import ConfigError

NAMES = ["instant", "llama-70b-h100-tp8", "llama-8b-l40s", "qwen3-32b-h200-tp8", "smollm2-cpu"]


def test_these_are_shipped() -> None:
    assert sorted(shipped()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_fits_itself(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    limits = profile.limits
    assert limits.num_blocks * limits.block_size >= limits.max_model_len


@pytest.mark.parametrize(
    ("name", "layers", "kib_per_token"),
    [("qwen3-32b-h200-tp8", 64, 256), ("llama-70b-h100-tp8", 80, 320), ("llama-8b-l40s", 32, 128)],
)
def test_kv_bytes_are_the_published_ones(name: str, layers: int, kib_per_token: int) -> None:
    shape = load(name).shape
    assert shape.layers == layers
    assert shape.layers * shape.kv_heads * shape.cell_bytes == kib_per_token << 10


def test_a_step_by_hand() -> None:
    profile = load("llama-8b-l40s")
    assert profile.step_ms([], 0, 0) == 0
    by_hand = 23 + 0.088 * 1500 + 0.0000029 * (1000 * 0 + 500 * 2000) + 0.02 * 3 + 0.00019 * 9000
    assert profile.step_ms([(1000, 0), (500, 2000)], 3, 9000) == pytest.approx(by_hand)


def test_the_fit_meets_what_it_was_fitted_to() -> None:
    """Published: 16,000 tokens prefilled at 8 QPS, 7 ms TPOT with about seven such requests, 5.6 to 5.8 alone."""
    profile = load("qwen3-32b-h200-tp8")
    prompt_s = 2 * profile.step_ms([(8000, 0)], 0, 0) / 1e3
    load_ = 8 * prompt_s
    assert 0.7 < load_ < 1
    ttft_s = prompt_s + load_ * prompt_s / (2 * (1 - load_))
    assert 0.4 < ttft_s < 0.8
    assert 5.5 < profile.step_ms([], 1, 1000) < 5.8
    assert 6.7 < profile.step_ms([], 7, 7 * 16_000) < 7.3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("layers: 2", "layres: 2"), "layers"),
        (("layers: 2", "layers: two"), "layers"),
        (("layers: 2", "layers: 0"), "layers"),
        (("name: instant", "name: [1"), "not YAML"),
        (("{ms: 0, source: nothing is modelled}", "{ms: 0}"), "source"),
        (("{ms: 0, source: nothing is modelled}", "{ms: -1, source: nothing is modelled}"), "ms"),
        (("vocab_size: 32000", "vocab_size: 3"), "vocab_size"),
    ],
)
def test_a_wrong_file_names_the_field(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    text = shipped()["instant"].read_text()
    assert change[0] in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(change[0], change[1], 1))
    with pytest.raises(ConfigError, match=said):
        load(str(path))


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'instant'"):
        load("instnat")
    with pytest.raises(ConfigError, match="No such file"):
        load("./none.yaml")
