"""The router's JSON: what is read and written again means the same to an engine, which reads with Python's json."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.http import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """NaN is NaN; an int is no float."""
    return repr(a) == repr(b)


@given(VALUES)
def test_through_the_router_nothing_changes(value: object) -> None:
    read, plain = wire.loads(json.dumps(value).encode())
    assert same(read, value)
    assert same(json.loads(wire.dumps(read, plain)), value)


@pytest.mark.parametrize("raw", [b"NaN", b"1e400", b'"\\ud800"', "\ufeff{}".encode(), '{"a": 1}'.encode("utf-16")])
def test_what_only_python_reads_is_written_by_python(raw: bytes) -> None:
    read, plain = wire.loads(raw)
    assert not plain and same(read, json.loads(raw))
    assert same(json.loads(wire.dumps(read, plain)), read)


def test_no_number_is_not_written_as_null() -> None:
    read, plain = wire.loads(b'{"temperature": NaN, "x": Infinity}')
    again = json.loads(wire.dumps(read, plain))
    assert math.isnan(again["temperature"]) and again["x"] == math.inf


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a": 1,}', b'"\xff"', b"[" * 100_000])
def test_what_is_none_is_an_error(raw: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        wire.loads(raw)
