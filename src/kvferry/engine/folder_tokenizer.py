"""A model's own tokenizer and chat template, from its folder. `tokenizers` and `jinja2` are an extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvferry.engine.text import BUILTIN, REPLACEMENT, Chat, Detokenizer, flat
from kvferry.errors import ConfigError, unknown_name
from kvferry.launch.model import PACKAGED, prepare

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Library

EXTRA = "pip install 'kvferry[tokenizer]'"
CONTEXT = 8
"""Prompt tokens that the detokenizer is shown, so that the first output token is joined to them rightly."""
_INVALID_PREFIX = "Invalid prefix"


def folder_of(name: str) -> Path:
    """Raises `ConfigError`."""
    if name in PACKAGED:
        return prepare(name)
    path = Path(name).expanduser()
    if (path / "tokenizer.json").is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"tokenizer: {name} has no tokenizer.json", hint="give the folder of a model that has one")
    error = unknown_name("tokenizer", name, [BUILTIN, *PACKAGED])
    error.hint = f"a folder with tokenizer.json works too; {error.hint}"
    raise error


class FolderTokenizer:
    threaded = True

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if the folder's files, or the libraries that read them, are not there."""
        try:
            from tokenizers import Tokenizer
            from tokenizers.decoders import DecodeStream
        except ImportError:
            raise ConfigError(f"tokenizer: {folder} needs the package 'tokenizers'", hint=EXTRA) from None
        self._new_stream = DecodeStream
        self._library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        settings = _json(folder / "tokenizer_config.json")
        self._bos, eos = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
        self._eos = eos
        eos_id = self._library.token_to_id(eos) if eos else None
        if eos_id is None:
            raise ConfigError(f"tokenizer: {folder}/tokenizer_config.json has no eos_token of the vocabulary")
        self.eos_token_id: int = eos_id
        self.template_source = _template_source(folder, settings)
        self._template = _template(folder, self.template_source)

    @property
    def library(self) -> Library:
        return self._library

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # The library's `encode` of a single text keeps the interpreter to itself; this one lets other threads run.
        return list(self._library.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._library.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        text = str(self._library.decode([token_id], skip_special_tokens=False))
        return "" if REPLACEMENT in text else text

    def piece(self, token_id: int) -> str:
        return str(self._library.id_to_token(token_id) or "")

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool = True) -> Detokenizer:
        return StreamDetokenizer(self._library, self._new_stream, prompt, skip_special)

    def render(self, chat: Chat) -> str:
        if self._template is None:
            raise ConfigError("messages: this tokenizer has no chat template", hint="use /v1/completions")
        from jinja2 import TemplateError

        names = {
            "messages": [message | {"content": flat(message.get("content"))} for message in chat.messages],
            "tools": chat.tools,
            "add_generation_prompt": chat.generation_prompt and not chat.continue_final,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        try:
            text = self._template.render(**(chat.variables | names))
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"messages: the chat template refused them: {error}") from None
        if chat.continue_final:
            final = flat(chat.messages[-1].get("content")).strip()
            return text[: text.rindex(final) + len(final)] if final and final in text else text
        return text


class StreamDetokenizer:
    def __init__(self, library: Library, new_stream: Any, prompt: Sequence[int], skip_special: bool) -> None:
        self._library = library
        self._restart: Callable[[], Any] = lambda: new_stream(skip_special_tokens=skip_special)
        self._stream = new_stream(ids=list(prompt[-CONTEXT:]), skip_special_tokens=skip_special)

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(self._step(token_id) for token_id in token_ids)

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._library, token_id) or ""
        except Exception as error:
            # The library raises nothing narrower. It loses its place over tokens that are no text together.
            if _INVALID_PREFIX not in str(error):
                raise
            self._stream = self._restart()
            return self._stream.step(self._library, token_id) or ""


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    """The folder's default chat template; None if there is none."""
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    file = folder / "chat_template.jinja"
    if source is None and file.is_file():
        source = file.read_text()
    return source


def _template(folder: Path, source: str | None) -> Template | None:
    if source is None:
        return None
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(f"tokenizer: the chat template of {folder} needs the package 'jinja2'", hint=EXTRA) from None

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"tokenizer: the chat template of {folder} does not compile: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer: {path} is no JSON object")
    return content


def _content(token: Any) -> str:
    """Special tokens stand there as text, or as an object with `content`."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
