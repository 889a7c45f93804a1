"""A tiny model of the family that speaks harmony, without weights, and what makes it say a script.

Its tokenizer knows as many tokens as the family's and no text of theirs: what is said in harmony is made text by
vLLM's harmony parser. `Scripted` runs in the engine (`--logits-processors harmony_model:Scripted`), where
`vllm_xargs: {"script": [ids]}` of a request are what it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

VOCABULARY = 201_088
END = 200_002
"""`<|return|>`."""


def make(folder: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GptOssConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{at}": at for at in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{END}").save_pretrained(folder)
    GptOssConfig(
        architectures=["GptOssForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        eos_token_id=END,
        dtype="float32",
    ).save_pretrained(folder)
    return folder


def script(text: str) -> list[int]:
    """The tokens of a text with harmony's marks in it."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    ids: list[int] = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS).encode(text, allowed_special="all")
    return ids


class Scripted(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._scripts: dict[int, tuple[list[int], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Any."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._scripts, batch_update, _of)

    def apply(self, logits: Any) -> Any:
        for row, (said, so_far) in self._scripts.items():
            logits[row] = float("-inf")
            logits[row, said[min(len(so_far), len(said) - 1)]] = 0.0
        return logits


def _of(params: Any, prompt: Any, so_far: list[int]) -> tuple[list[int], list[int]] | None:
    said = (params.extra_args or {}).get("script")
    return ([int(token) for token in said], so_far) if said else None
