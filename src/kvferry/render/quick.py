"""A prompt's token ids without what a renderer doesn't ask for: where each token is in the text, masks, token types.

Three quarters of what a long prompt costs a render worker is its tokenizer, and a quarter of that is keeping offsets.
The Rust library under Hugging Face's tokenizers leaves them out on demand, with the same ids. vLLM's renderer is given
this way in place of its own; what it can't do goes vLLM's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

PROBES = (
    "",
    " ",
    "The capital of France is Paris.",
    "  two\n\nlines\t and\r\nmore ",
    "naïve café, 東京, 🚀👩‍👩‍👧",
    "e\u0301 \u00a0 \ufeff \u0000 \ufffd",
    "x" * 300,
    "<s></s><|im_start|>user\nhi<|im_end|>\n<|endoftext|> [INST] {json: 1e-9}",
)
"""Told apart here, a tokenizer stays with vLLM's way."""
_KNOWN = frozenset(("truncation", "max_length", "add_special_tokens"))


class Quick:
    """`ids`: what `tokenizer(text)["input_ids"]` are without truncation. Any thread.

    Made of a tokenizer whose Python side adds nothing to the Rust one, nor to what `backend`, the library's class for
    those, does. Raises `ValueError`, saying why, for another.
    """

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        if not isinstance(tokenizer, backend):
            raise ValueError("its tokenizer isn't one of the Rust library's")
        callers = [one for one in type(tokenizer).__mro__ if "__call__" in vars(one)]
        own = [one for one in callers if not issubclass(backend, one) and not one.__module__.startswith("vllm.")]
        if type(tokenizer)._encode_plus is not backend._encode_plus or own:
            raise ValueError("its tokenizer prepares texts in Python")
        self._rust = copy.deepcopy(tokenizer._tokenizer)  # nobody sets anything of it while another encodes
        if not hasattr(self._rust, "encode_batch_fast"):
            raise ValueError("its tokenizers library always keeps offsets")
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = tokenizer.split_special_tokens
        for text in (*PROBES, "".join(map(str, tokenizer.all_special_tokens))):
            for special in (True, False):
                if self.ids(text, special) != tokenizer(text, add_special_tokens=special)["input_ids"]:
                    raise ValueError(f"its ids of {text!r} would differ")

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def install(renderer: Any, base: Any, backend: Any, make_async: Callable[..., Any]) -> str:
    """Why vLLM's own way stays; "" where it doesn't. `base`: vLLM's `BaseRenderer`; `make_async`: its own."""
    names = ("_tokenize_prompt", "_tokenize_prompt_async", "_wants_offsets", "_build_tokens_prompt", "_executor")
    if not all(hasattr(renderer, name) for name in names):
        return "this version's renderer is not known"
    if type(renderer)._tokenize_prompt is not base._tokenize_prompt:
        return "this model's renderer has its own way"
    try:
        quick = Quick(renderer.tokenizer, backend)
    except ValueError as why:
        return str(why)
    own = renderer._tokenize_prompt

    def tokenize(prompt: Any, params: Any) -> Any:
        options = params.get_encode_kwargs()
        if options.keys() <= _KNOWN and not renderer._wants_offsets(prompt, params):
            ids = quick.ids(prompt["prompt"], options.get("add_special_tokens", True))
            most = options.get("max_length") if options.get("truncation") else None
            if most is None or len(ids) <= most:
                return renderer._build_tokens_prompt(ids, prompt)
        return own(prompt, params)

    renderer._tokenize_prompt = tokenize
    renderer._tokenize_prompt_async = make_async(tokenize, executor=renderer._executor)
    return ""
