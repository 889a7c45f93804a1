"""What a render tier and its engines must agree about: equal for equal files, and named where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.connector import told
from kvferry.connector.middleware import CheckTransferParams
from kvferry.engine.folder_tokenizer import FolderTokenizer
from kvferry.engine.server import ServerConfig
from kvferry.engine.settings import settings_of
from kvferry.engine.text import Builtin
from kvferry.render.settings import PATH, Settings, decode, differences, of_frontend, template_hash, tokenizer_hash

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"
FULL = Settings(
    model="/m",
    served_model_names=("m",),
    max_model_len=4096,
    vllm="0.32.0",
    tokenizer="aa",
    chat_template="bb",
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
    reasoning_parser="",
)


def folder(path: Path, words: list[str], special: str = "<|im_start|>") -> Path:
    """A model's tokenizer files, of a byte-level BPE trained on `words`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[special, "<|im_end|>"])
    library.train_from_iterator(words, trainer)
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def test_one_folder_has_one_hash_whoever_reads_it(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", ["the quick brown fox jumps over the lazy dog"] * 3)
    ours, theirs = FolderTokenizer(one), transformers_tokenizer(one)
    assert tokenizer_hash(ours.library) == tokenizer_hash(theirs)
    assert template_hash(ours.template_source) == template_hash(theirs.chat_template) == template_hash(TEMPLATE)
    other = FolderTokenizer(folder(tmp_path / "other", ["pack my box with five dozen liquor jugs"] * 3))
    renamed = FolderTokenizer(folder(tmp_path / "renamed", ["the quick brown fox jumps over the lazy dog"] * 3, "<s>"))
    assert len({tokenizer_hash(one.library) for one in (ours, other, renamed)}) == 3


def test_a_token_that_became_special_is_another_tokenizer(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    library = FolderTokenizer(folder(tmp_path / "one", ["a b c"])).library
    before = tokenizer_hash(library)
    library.add_tokens([AddedToken("<tool_call>", special=False)])
    plain = tokenizer_hash(library)
    library.add_special_tokens([AddedToken("<tool_call>", special=True)])
    assert len({before, plain, tokenizer_hash(library)}) == 3


def test_templates_by_name() -> None:
    assert template_hash({"default": "x"}) == template_hash("x") != template_hash({"default": "x", "tool_use": "y"})
    assert template_hash(None) == template_hash({}) == ""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"max_model_len": 2048}, [("max_model_len", 4096, 2048)]),
        ({"tokenizer": "cc"}, [("tokenizer", "aa", "cc")]),
        ({"tool_call_parser": ""}, [("tool_call_parser", "hermes", "")]),
        ({"reasoning_parser": "qwen3"}, [("reasoning_parser", "", "qwen3")]),
        ({"enable_auto_tool_choice": False}, [("enable_auto_tool_choice", True, False)]),
        ({"vllm": "0.32.1+cpu"}, []),
        ({"vllm": "0.31.0"}, [("vllm", "0.32.0", "0.31.0")]),
        ({"served_model_names": ("m", "adapter")}, []),
        ({"served_model_names": ("n",)}, [("served_model_names", ["m"], ["n"])]),
        ({"tokenizer": None, "chat_template": None, "tool_call_parser": None, "reasoning_parser": None}, []),
        ({"model": "/elsewhere/m"}, []),
    ],
)
def test_differences(change: dict[str, Any], found: list[tuple[str, Any, Any]]) -> None:
    assert differences(FULL, msgspec.structs.replace(FULL, **change)) == found


def test_what_a_later_version_tells_more_is_ignored() -> None:
    raw = json.dumps(msgspec.to_builtins(FULL) | {"something_new": 1}).encode()
    assert decode(raw) == FULL
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"max_model_len": "many"}')


def frontend(**args: Any) -> tuple[Any, Any]:
    model = SimpleNamespace(max_model_len=4096, max_logprobs=20, get_diff_sampling_param=lambda: {"top_k": 20})
    structured = SimpleNamespace(reasoning_parser="qwen3")
    given = {
        "model": "/m",
        "served_model_name": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "default_chat_template_kwargs": None,
        "enable_auto_tool_choice": True,
        "exclude_tools_when_tool_choice_none": False,
        "tool_call_parser": "hermes",
        "lora_modules": [SimpleNamespace(name="adapter")],
    }
    return SimpleNamespace(**(given | args)), SimpleNamespace(model_config=model, structured_outputs_config=structured)


def test_a_vllm_frontend(tmp_path: Path) -> None:
    tokenizer = transformers_tokenizer(folder(tmp_path / "one", ["a b c"]))
    args, config = frontend()
    found = of_frontend(args, config, tokenizer, load_template=str.upper)
    assert (found.served_model_names, found.max_model_len) == (("/m", "adapter"), 4096)
    assert (found.tool_call_parser, found.reasoning_parser) == ("hermes", "qwen3")
    assert (found.chat_template, found.tokenizer) == (template_hash(TEMPLATE), tokenizer_hash(tokenizer))
    assert found.generation_config == '{"top_k": 20}'
    args, config = frontend(chat_template="given", tool_call_parser=None)
    other = of_frontend(args, config, tokenizer, load_template=str.upper)
    assert (other.chat_template, other.tool_call_parser) == (template_hash("GIVEN"), "")
    assert [name for name, _, _ in differences(found, other)] == ["chat_template", "tool_call_parser"]


def test_an_engine_for_tokens_only_tells_of_none_of_it_and_differs_in_none() -> None:
    args, config = frontend(tokens_only=True)
    found = of_frontend(args, config, None, load_template=str.upper)
    assert (found.tokenizer, found.chat_template, found.tool_call_parser) == (None, None, None)
    assert differences(msgspec.structs.replace(FULL, served_model_names=("/m",), vllm=None), found) == []


def test_a_sim_engine(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(folder(tmp_path / "one", ["a b c"]))
    config = ServerConfig(names=("m",), max_model_len=4096, vocab_size=400)
    found = settings_of(config, tokenizer)
    assert (found.served_model_names, found.tokenizer) == (("m",), tokenizer_hash(tokenizer.library))
    plain = settings_of(config, Builtin(400))
    assert [name for name, _, _ in differences(found, plain)] == ["tokenizer", "chat_template"]


async def test_the_middleware_tells_once_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def encoded(state: Any) -> bytes:
        made.append(state)
        return msgspec.json.encode(FULL)

    monkeypatch.setattr(told, "encoded", encoded)
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = CheckTransferParams(app)
    for path in (PATH, PATH, "/v1/models"):
        scope = {"type": "http", "method": "GET", "path": path, "app": SimpleNamespace(state="the state")}
        await middleware(scope, receive, send)
    assert made == ["the state"] and passed == ["/v1/models"]
    assert [message["status"] for message in sent if "status" in message] == [200, 200]
    assert decode(sent[1]["body"]) == decode(sent[3]["body"]) == FULL
