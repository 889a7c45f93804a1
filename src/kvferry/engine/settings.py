"""What this engine tells a render tier: vLLM's settings as far as it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.engine.text import Tokenizer
from kvferry.render.settings import Settings, template_hash, tokenizer_hash, vocabulary_hash

if TYPE_CHECKING:
    from kvferry.engine.server import ServerConfig


def settings_of(config: ServerConfig, tokenizer: Tokenizer) -> Settings:
    """Parsers, version and the rest stay untold: there is no vLLM here whose they could be."""
    from kvferry.engine.folder_tokenizer import FolderTokenizer

    if isinstance(tokenizer, FolderTokenizer):
        hashed, template = tokenizer_hash(tokenizer.library), template_hash(tokenizer.template_source)
    else:
        hashed, template = vocabulary_hash([(f"builtin {tokenizer.vocab_size}", 0)], [], []), template_hash("builtin")
    return Settings(
        model=config.names[0],
        served_model_names=config.names,
        max_model_len=config.max_model_len,
        tokenizer=hashed,
        chat_template=template,
    )
