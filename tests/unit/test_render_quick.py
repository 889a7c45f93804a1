"""The quick way of tokenizing gives the ids that the tokenizer's own call gives, or is not taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.render import compat
from kvferry.render.quick import Quick

SPECIAL = "<|im_start|>"
WORDS = ["the capital of France is Paris", "naïve café", "東京 is big", "x = [1, 2, 3];\n\treturn x", "🚀 to the moon"]


def byte_level() -> Any:
    """As Llama 3, Qwen and SmolLM have it; a first token is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>", SPECIAL])
    library.train_from_iterator(WORDS, trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


def unigram() -> Any:
    """As models of SentencePiece have it: normalized, spaces are part of words; a last token is added."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", "</s>", SPECIAL])
    library.train_from_iterator(WORDS * 20, trainer)
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return library


def tokenizer_of(library: Any, kind: str = "TokenizersBackend") -> Any:
    import transformers

    return getattr(transformers, kind)(tokenizer_object=library, extra_special_tokens=["<|tool|>"])


def quick_of(tokenizer: Any) -> Quick:
    import transformers

    return Quick(tokenizer, transformers.TokenizersBackend)


@pytest.fixture(scope="module", params=[byte_level, unigram], ids=lambda make: str(make.__name__))
def both(request: pytest.FixtureRequest) -> tuple[Any, Quick]:
    make: Callable[[], Any] = request.param
    tokenizer = tokenizer_of(make())
    return tokenizer, quick_of(tokenizer)


texts = st.lists(st.text() | st.sampled_from([SPECIAL, "<|tool|>", "<s>", "</s>", *WORDS]), max_size=8).map("".join)


@given(text=texts, special=st.booleans())
def test_the_ids_are_those_of_the_call(both: tuple[Any, Quick], text: str, special: bool) -> None:
    tokenizer, quickly = both
    assert quickly.ids(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]


def test_a_call_that_truncates_or_pads_changes_nothing_here(both: tuple[Any, Quick]) -> None:
    tokenizer, quickly = both
    before = quickly.ids(WORDS[0], True)
    assert len(before) > 4
    assert len(tokenizer(WORDS[0], truncation=True, max_length=4)["input_ids"]) == 4
    assert quickly.ids(WORDS[0], True) == before


def test_threads_encode_at_once(both: tuple[Any, Quick]) -> None:
    tokenizer, quickly = both
    many = [" ".join(WORDS[: 1 + at % 5]) * (1 + at % 7) for at in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: quickly.ids(text, True), many))
    assert found == [tokenizer(text)["input_ids"] for text in many]


def test_a_tokenizer_that_prepares_in_python_is_left_alone() -> None:
    tokenizer = tokenizer_of(byte_level())
    base = type(tokenizer)

    class Calls(base):  # type: ignore[misc, valid-type]
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.strip(), **options)

    class Encodes(base):  # type: ignore[misc, valid-type]
        def _encode_plus(self, text: str, **options: Any) -> Any:
            return super()._encode_plus(text.strip(), **options)

    for kind in (Calls, Encodes):
        tokenizer.__class__ = kind
        with pytest.raises(ValueError, match="prepares texts in Python"):
            quick_of(tokenizer)
    with pytest.raises(ValueError, match="Rust"):
        quick_of(object())


def test_ids_that_would_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quick, "ids", lambda self, text, special: [7])
    with pytest.raises(ValueError, match="would differ"):
        quick_of(tokenizer_of(byte_level()))


# -- in vLLM's renderer


def renderer_of(tokenizer: Any) -> Any:
    from vllm.renderers.base import BaseRenderer

    class Renderer(BaseRenderer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tokenizer, self._executor = tokenizer, ThreadPoolExecutor(1)
            self._tokenize_prompt_async = None

        def _can_produce_offsets(self) -> bool:
            return True

    return type("Renderer", (Renderer,), dict.fromkeys(Renderer.__abstractmethods__))()


def params(**options: Any) -> Any:
    return SimpleNamespace(
        get_encode_kwargs=lambda: {"add_special_tokens": True} | options,
        return_token_offsets=options.pop("offsets", False),
    )


async def test_vllms_renderer_takes_it_where_it_can() -> None:
    pytest.importorskip("vllm")
    tokenizer = tokenizer_of(byte_level())
    plain, renderer = renderer_of(tokenizer), renderer_of(tokenizer)
    assert compat.make_quick(renderer) == ""
    calls: list[str] = []
    base = type(tokenizer)

    class Counts(base):  # type: ignore[misc, valid-type]
        def __call__(self, text: str, **options: Any) -> Any:
            calls.append(text)
            return super().__call__(text, **options)

    tokenizer.__class__ = Counts
    prompt = {"prompt": WORDS[0]}
    for asked, calls_of_its_own in (
        ({}, 0),
        ({"truncation": True, "max_length": 100}, 0),
        ({"truncation": True, "max_length": 4}, 1),
        ({"truncation": False, "max_length": 4}, 0),
        ({"offsets": True}, 1),
    ):
        calls.clear()
        found = renderer._tokenize_prompt(prompt, params(**asked))
        assert len(calls) == calls_of_its_own, asked
        assert found == await renderer._tokenize_prompt_async(prompt, params(**asked))
        assert found == plain._tokenize_prompt(prompt, params(**asked)), asked
    assert found["prompt_token_offsets"]


def test_a_renderer_that_is_not_known_is_left_alone() -> None:
    pytest.importorskip("vllm")
    assert "not known" in compat.make_quick(SimpleNamespace())
    renderer = renderer_of(tokenizer_of(byte_level()))
    own = type("Own", (type(renderer),), {"_tokenize_prompt": lambda self, prompt, params: None})
    renderer.__class__ = own
    assert "its own way" in compat.make_quick(renderer)
    assert "_tokenize_prompt" not in vars(renderer)
