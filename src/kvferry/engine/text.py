"""Text <-> token ids. `Builtin` needs no dependency and no file; a model's own tokenizer is in folder_tokenizer.py.

Output is turned into text piece by piece: a character whose bytes come in several tokens appears with its last one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from itertools import count, islice, product
from typing import Any, Protocol

import msgspec

from kvferry.engine.content import EOS, FIRST_WORD
from kvferry.errors import ConfigError

EOS_TOKEN_ID = EOS
"""End of sequence of the builtin tokenizer; nothing is encoded to it."""
STAND_IN = 255
"""Means the byte whose own id is the end of sequence. As a byte it occurs in no UTF-8 text."""
BUILTIN = "builtin"
REPLACEMENT = "\ufffd"


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat template sees. `variables`: further names (the request's `chat_template_kwargs` and the like)."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    generation_prompt: bool = True
    continue_final: bool = False
    variables: dict[str, Any] = {}


class Detokenizer(Protocol):
    """The text of one request's output. Owner: whoever reads that output, in order."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what they only begin comes with a later call."""


class Tokenizer(Protocol):
    """Token ids at or above `vocab_size` are not to be given to it."""

    vocab_size: int
    eos_token_id: int
    threaded: bool
    """`encode` leaves the interpreter to other threads, so that a long text is worth a thread."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str:
        """Of one token alone; '' where it is but a part of a character."""

    def piece(self, token_id: int) -> str:
        """As the vocabulary spells it."""

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool = True) -> Detokenizer: ...

    def render(self, chat: Chat) -> str:
        """Raises `ConfigError` for messages that the template refuses."""


_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
_WORD = re.compile(r" [a-z]+")
_TO_IDS = bytes.maketrans(bytes((EOS_TOKEN_ID,)), bytes((STAND_IN,)))


def _words() -> Iterator[str]:
    """Words of one syllable, then of two, and so on, each with the space before it; never the same twice."""
    for length in count(1):
        for syllables in product(_SYLLABLES, repeat=length):
            yield " " + "".join(syllables)


class Builtin:
    """Ids 0 to 255 are bytes (save for the end of sequence), the others words. A word's id is its place in a fixed
    order. Every text comes back from its ids; so do ids of words from their text.
    """

    eos_token_id = EOS_TOKEN_ID
    threaded = False

    def __init__(self, vocab_size: int) -> None:
        """Raises `ConfigError` if there is no room for a word."""
        if vocab_size <= FIRST_WORD:
            raise ConfigError(f"vocab_size: {vocab_size} is too small, the builtin tokenizer needs above {FIRST_WORD}")
        self.vocab_size = vocab_size
        self.texts = [bytes((byte,)).decode(errors="replace") for byte in range(FIRST_WORD)]
        self.texts[STAND_IN], self.texts[EOS_TOKEN_ID] = self.texts[EOS_TOKEN_ID], ""
        self.texts += islice(_words(), vocab_size - FIRST_WORD)
        self._ids = {text: FIRST_WORD + at for at, text in enumerate(self.texts[FIRST_WORD:])}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = []
        done = 0
        known = self._ids.get
        for match in _WORD.finditer(text):
            token_id = known(match.group())
            if token_id is None:
                continue
            if match.start() > done:
                ids += text[done : match.start()].encode().translate(_TO_IDS)
            ids.append(token_id)
            done = match.end()
        ids += text[done:].encode().translate(_TO_IDS)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = ByteDetokenizer(self.texts)
        return detokenizer.add(token_ids) + detokenizer.rest()

    def token_text(self, token_id: int) -> str:
        text = self.texts[token_id]
        return "" if text == REPLACEMENT else text

    def piece(self, token_id: int) -> str:
        return self.token_text(token_id)

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(self.texts)

    def render(self, chat: Chat) -> str:
        """`<|role|>`, a line break, the content, a line break, for each message."""
        parts = [f"<|tools|>\n{msgspec.json.encode(list(chat.tools)).decode()}\n"] if chat.tools else []
        parts += [f"<|{message['role']}|>\n{flat(message.get('content'))}\n" for message in chat.messages]
        if chat.continue_final:
            return "".join(parts).removesuffix("\n")
        return "".join(parts) + ("<|assistant|>\n" if chat.generation_prompt else "")


class ByteDetokenizer:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False
        """A character has begun and not ended."""

    def add(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._open and ((only := token_ids[0]) >= FIRST_WORD or only < 128):
            return self._texts[only]
        text = ""
        for token_id in token_ids:
            if token_id == EOS_TOKEN_ID:
                continue
            whole = token_id >= FIRST_WORD or token_id == STAND_IN
            text += self._decoder.decode(self._texts[token_id].encode() if whole else bytes((token_id,)))
        self._open = bool(self._decoder.getstate()[0])
        return text

    def rest(self) -> str:
        """At the very end: a replacement character for one that never ended."""
        return self._decoder.decode(b"", final=True)


def flat(content: Any) -> str:
    """The text of one message's content, which may come in parts; the parts were checked to be text."""
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""


def open_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """`builtin`, a model's name, or a folder with tokenizer.json. `vocab_size`: of the model, for `builtin`.

    Raises `ConfigError`.
    """
    if name == BUILTIN:
        return Builtin(vocab_size)
    from kvferry.engine.folder_tokenizer import FolderTokenizer, folder_of

    return FolderTokenizer(folder_of(name))
