"""How long a model takes on a machine, and what its KV looks like: a strict YAML file, each number with its source.

    step_ms = fixed + prefill_token * n + prefill_context * sum(n_i * c_i) + decode_seq * d + context_token * C

for a step with n prompt tokens (request i brings n_i of them after c_i computed ones), d decoding requests and C tokens
of context read by these. All numbers are milliseconds, of the whole engine with all its ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvferry.errors import ConfigError, unknown_name

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds, and where they are from."""

    ms: Annotated[float, msgspec.Meta(ge=0)]
    source: Annotated[str, msgspec.Meta(min_length=10)]


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed: Number
    prefill_token: Number
    prefill_context: Number
    decode_seq: Number
    context_token: Number


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV of the model. `element_bytes`: of one channel of K or of V."""

    layers: Positive
    kv_heads: Positive
    head_size: Positive
    element_bytes: Positive
    source: Annotated[str, msgspec.Meta(min_length=10)]

    @property
    def cell_bytes(self) -> int:
        """K and V of one token of one head of one layer."""
        return 2 * self.head_size * self.element_bytes


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of these names, where the command line doesn't say otherwise. `num_blocks`: the KV pool."""

    block_size: Positive
    num_blocks: Positive
    max_model_len: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    vocab_size: Annotated[int, msgspec.Meta(ge=512)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hardware`: what the times are of. `about`: what a reader of the figures should know."""

    name: str
    hardware: str
    about: str
    shape: Shape
    limits: Limits
    timing: Timing

    def step_ms(self, prompt: Iterable[tuple[int, int]], decodes: int, context: int) -> float:
        """Duration of a step; `prompt`: (tokens, computed before) of each request that prefills. 0 without work."""
        tokens = crossed = 0
        for new, before in prompt:
            tokens += new
            crossed += new * before
        if not tokens and not decodes:
            return 0.0
        t = self.timing
        return (
            t.fixed.ms
            + t.prefill_token.ms * tokens
            + t.prefill_context.ms * crossed
            + t.decode_seq.ms * decodes
            + t.context_token.ms * context
        )


def shipped() -> dict[str, Any]:
    """Name -> file of each profile that comes with kvferry."""
    folder = resources.files("kvferry.engine") / "profiles"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def load(name_or_path: str) -> Profile:
    """A shipped profile by its name, or a file. Raises `ConfigError` naming file, field and what was expected."""
    known = shipped()
    if name_or_path in known:
        text = known[name_or_path].read_bytes()
    elif "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        try:
            text = Path(name_or_path).read_bytes()
        except OSError as error:
            raise ConfigError(f"profile {name_or_path}: {error.strerror or error}") from None
    else:
        raise unknown_name("profile", name_or_path, known)
    return _checked(name_or_path, text)


def _checked(name: str, text: bytes) -> Profile:
    try:
        import yaml
    except ImportError:
        raise ConfigError("profiles need PyYAML", hint="pip install 'kvferry[sim]'") from None
    try:
        return msgspec.yaml.decode(text, type=Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"profile {name}: {error}{_nearest(str(error))}") from None
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"profile {name}: not YAML: {' '.join(str(error).split())}") from None


def _nearest(complaint: str) -> str:
    """For an unknown field: the known one that it looks like."""
    if "unknown field" not in complaint:
        return ""
    field = complaint.split("unknown field `", 1)[1].split("`")[0]
    fields = {name for kind in (Profile, Shape, Limits, Timing, Number) for name in kind.__struct_fields__}
    near = difflib.get_close_matches(field, fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
