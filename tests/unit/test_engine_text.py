"""Tokenizers: what goes in comes out, and no half character ever does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.stops import StopFinder
from kvferry.engine.text import EOS_TOKEN_ID, FIRST_WORD, REPLACEMENT, Builtin, Chat, Tokenizer, open_tokenizer
from kvferry.errors import ConfigError

VOCAB = 7000
BUILTIN = Builtin(VOCAB)
TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXT)
def test_every_text_comes_back(text: str) -> None:
    ids = BUILTIN.encode(text)
    assert BUILTIN.decode(ids) == text
    assert EOS_TOKEN_ID not in ids


@given(st.lists(st.integers(FIRST_WORD, VOCAB - 1)))
def test_ids_of_words_come_back(ids: list[int]) -> None:
    assert BUILTIN.encode(BUILTIN.decode(ids)) == ids


@given(st.lists(st.sampled_from([" ba", " zuzu", " word", "ba", "\x02", " ", "é", "猫", "🙂", "\n", " Ba"])))
def test_words_among_other_text_come_back(parts: list[str]) -> None:
    text = "".join(parts)
    assert BUILTIN.decode(BUILTIN.encode(text)) == text


@given(st.lists(st.integers(0, VOCAB - 1)), st.randoms())
def test_pieces_join_to_the_whole_however_they_are_cut(ids: list[int], cuts: random.Random) -> None:
    detokenizer, text, at = BUILTIN.detokenizer(()), "", 0
    while at < len(ids):
        size = cuts.randint(1, 4)
        text += detokenizer.add(ids[at : at + size])
        at += size
    assert text + detokenizer.rest() == BUILTIN.decode(ids)


@given(TEXT)
def test_no_piece_of_good_text_has_a_replacement_character(text: str) -> None:
    detokenizer = BUILTIN.detokenizer(())
    pieces = [detokenizer.add((token_id,)) for token_id in BUILTIN.encode(text)]
    assert "".join(pieces) == text
    assert REPLACEMENT in text or all(REPLACEMENT not in piece for piece in pieces)


def test_words_are_words() -> None:
    words = BUILTIN.texts[FIRST_WORD:]
    assert len(set(words)) == len(words) == VOCAB - FIRST_WORD
    assert all(word[0] == " " and word[1:].isalpha() and word.isascii() for word in words)
    assert BUILTIN.decode([FIRST_WORD, EOS_TOKEN_ID, FIRST_WORD + 1]) == words[0] + words[1]


def test_the_text_of_one_token() -> None:
    assert BUILTIN.token_text(65) == "A"
    assert BUILTIN.token_text(0xC3) == ""
    assert BUILTIN.token_text(EOS_TOKEN_ID) == ""
    assert BUILTIN.token_text(FIRST_WORD) == " ba"


def test_the_builtin_chat_template() -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert BUILTIN.render(Chat(messages=messages)) == "<|system|>\nbe\n<|user|>\nhi\n<|assistant|>\n"
    assert BUILTIN.render(Chat(messages=messages, continue_final=True)) == "<|system|>\nbe\n<|user|>\nhi"
    assert BUILTIN.render(Chat(messages=messages, tools=[{"a": 1}])).startswith('<|tools|>\n[{"a":1}]\n')


@pytest.mark.parametrize(
    ("name", "said"),
    [("bultin", "did you mean 'builtin'?"), ("/nonexistent", "a folder with tokenizer.json works too")],
)
def test_an_unknown_tokenizer_is_one_clear_line(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        open_tokenizer(name, VOCAB)


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size: 256 is too small"):
        Builtin(256)


# -- stop strings


def ids_of(*words: str) -> list[int]:
    return [token_id for word in words for token_id in BUILTIN.encode(word)]


def finder(*stops: str, include: bool = False, min_tokens: int = 0) -> StopFinder:
    return StopFinder(BUILTIN.detokenizer(()), stops, include=include, min_tokens=min_tokens)


def test_a_stop_string_over_several_tokens() -> None:
    stop = finder("ba bo")
    assert stop.add(ids_of(" be")) == (1, None)
    assert stop.take(finished=False) == ""
    assert stop.add(ids_of(" ba")) == (1, None)
    assert stop.take(finished=False) == " b"
    assert stop.add(ids_of(" bo", " bu")) == (1, "ba bo")
    assert stop.take(finished=True) == "e "


def test_a_stop_string_in_the_output() -> None:
    stop = finder(" bo", include=True)
    assert stop.add(ids_of(" ba")) == (1, None)
    assert stop.take(finished=False) == " ba"
    assert stop.add(ids_of(" bobo")) == (1, " bo")
    assert stop.take(finished=True) == " bo"


def test_of_two_stop_strings_the_one_that_ends_first() -> None:
    stop = finder("bababa", "ab")
    assert stop.add(ids_of(" bababa")) == (1, "ab")
    assert stop.take(finished=True) == " b"


def test_no_stop_string_among_the_first_tokens() -> None:
    stop = finder(" ba", min_tokens=2)
    assert stop.add(ids_of(" ba", " be")) == (2, None)
    assert stop.add(ids_of(" bi")) == (1, None)
    assert stop.add(ids_of(" ba")) == (1, " ba")
    assert stop.take(finished=True) == " ba be bi"


def test_what_was_held_back_comes_at_the_end() -> None:
    stop = finder("never")
    assert stop.add(ids_of(" ba", " be"), skip_last=True) == (2, None)
    assert stop.take(finished=False) == ""
    assert stop.take(finished=True) == " ba"


def first_stop(ids: list[int], stops: list[str], include: bool) -> tuple[int, str | None, str]:
    """Tokens, stop string and text of the output, by looking through the whole text after each token."""
    for count in range(1, len(ids) + 1):
        text = BUILTIN.decode(ids[:count])
        ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, stop = min(ends, key=lambda found: found[0])
            return count, stop, text[: end if include else end - len(stop)]
    return len(ids), None, BUILTIN.decode(ids)


@given(
    st.lists(st.sampled_from([*BUILTIN.encode("abo "), FIRST_WORD, FIRST_WORD + 1]), min_size=1),
    st.lists(st.text("abeo ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.randoms(),
)
def test_stop_strings_are_found_as_by_looking_through_everything(
    ids: list[int], stops: list[str], include: bool, cuts: random.Random
) -> None:
    made = finder(*stops, include=include)
    text, kept, found, at = "", 0, None, 0
    while at < len(ids) and found is None:
        size = cuts.randint(1, 3)
        count, found = made.add(ids[at : at + size])
        kept, at = kept + count, at + size
        text += made.take(finished=found is not None or at >= len(ids))
    assert (kept, found, text) == first_stop(ids, stops, include)


# -- a model's own tokenizer, made here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE without merges: every token is one byte, so that characters are cut as badly as can be."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: at for at, text in enumerate(["<s>", "</s>", *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(path / "tokenizer.json"))
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}"
    )
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def own(folder: Path) -> Tokenizer:
    return open_tokenizer(str(folder), VOCAB)


def test_a_folder_gives_its_tokenizer(own: Tokenizer) -> None:
    assert (own.vocab_size, own.eos_token_id) == (258, 1)
    ids = own.encode("né 🙂", special=False)
    assert own.decode(ids) == "né 🙂"
    assert own.encode("né 🙂") == [0, *ids]
    assert len(ids) == len("né 🙂".encode())


def test_its_characters_come_whole(own: Tokenizer) -> None:
    detokenizer = own.detokenizer(own.encode("prompt"))
    pieces = [detokenizer.add((token_id,)) for token_id in own.encode("né 猫🙂", special=False)]
    assert pieces == ["n", "", "é", " ", "", "", "猫", "", "", "", "🙂"]


def test_its_detokenizer_survives_ids_that_are_no_text(own: Tokenizer) -> None:
    detokenizer = own.detokenizer(own.encode("p"))
    for token_id in own.encode("猫", special=False)[::-1] * 4:
        detokenizer.add((token_id,))
    assert detokenizer.add(own.encode("ok", special=False)).endswith("ok")


def test_its_chat_template(own: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert own.render(Chat(messages=messages, variables={"mood": "!"})) == "<s>[user]hi[assistant]!"
    assert own.render(Chat(messages=messages, continue_final=True)) == "<s>[user]hi"
    with pytest.raises(ConfigError, match="messages: the chat template refused them: user first"):
        own.render(Chat(messages=[{"role": "system", "content": "x"}]))


def test_a_chat_template_in_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="has no chat template"):
        open_tokenizer(str(tmp_path), VOCAB).render(Chat(messages=messages))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    assert open_tokenizer(str(tmp_path), VOCAB).render(Chat(messages=messages)) == '"hi"'


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        open_tokenizer(str(tmp_path), VOCAB)
