from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import EXAMPLES, mutated

from kvferry.protocol import codec
from kvferry.protocol import messages as wire


def head(version: int = codec.VERSION) -> bytes:
    return codec.MAGIC + bytes([version])


def test_every_message_type_has_an_example():
    assert {type(message) for message in EXAMPLES} == set(typing.get_args(wire.AnyMessage))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_unknown_field_is_refused(message):
    body = msgspec.msgpack.decode(codec.encode(message)[3:])
    with pytest.raises(codec.WireError, match="unknown field `novelty`"):
        codec.decode(head() + msgspec.msgpack.encode(body | {"novelty": 1}))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_shorter_message_is_refused(message):
    data = codec.encode(message)
    for size in range(len(data)):
        with pytest.raises(codec.WireError):
            codec.decode(data[:size])


def test_c56_no_message_carries_a_point_in_time():
    fields = {field.name for one in EXAMPLES for field in msgspec.structs.fields(one)}
    assert not [name for name in fields if name.endswith(("_at", "time", "deadline", "expiry"))]


def test_unknown_version_names_both():
    with pytest.raises(codec.WireError, match=f"wire version 9, expected {codec.VERSION}"):
        codec.decode(head(9) + codec.encode(wire.Beat())[3:])


def test_unknown_tag_is_named():
    with pytest.raises(codec.WireError, match="Bogus"):
        codec.decode(head() + msgspec.msgpack.encode({"type": "Bogus"}))


def test_wrong_type_and_mode_are_refused():
    body = msgspec.msgpack.decode(codec.encode(EXAMPLES[5])[3:])
    for change in ({"mode": "shove"}, {"block_ids": "x"}, {"reg_id": 1.5}):
        with pytest.raises(codec.WireError, match="malformed"):
            codec.decode(head() + msgspec.msgpack.encode(body | change))


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_a_wire_error_and_nothing_else(data, framed):
    try:
        codec.decode(head() + data if framed else data)
    except codec.WireError:
        pass


@given(mutated())
def test_a_message_that_was_tampered_with_is_one_again_or_a_wire_error(data):
    try:
        message = codec.decode(data)
    except codec.WireError:
        return
    assert codec.decode(codec.encode(message)) == message


def test_more_bytes_than_any_message_has_are_not_looked_at():
    with pytest.raises(codec.OversizedError, match=f"at most {codec.MAX_BYTES}"):
        codec.decode(codec.encode(wire.Refuse(code="c", reason="x" * codec.MAX_BYTES)))
    largest = wire.Grant(reg_id=1, block_ids=tuple(range(2**31, 2**31 + 1_000_000)))
    assert codec.decode(codec.encode(largest)) == largest


def test_nesting_without_end_is_a_wire_error():
    """In a field that the decoder has to skip over; it would end the engine otherwise."""
    for nest in (b"\x91" * 100_000 + b"\x01", b"\x81\xa1x" * 100_000 + b"\x01"):
        with pytest.raises(codec.WireError):
            codec.decode(head() + b"\x82\xa4type\xa4Beat\xa1z" + nest)


def test_lengths_that_are_not_there_take_no_memory():
    """A list that says it has four billion entries."""
    for field in (b"\xa9block_ids\xdd", b"\xa7novelty\xdf", b"\xa6reason\xdb"):
        with pytest.raises(codec.WireError):
            codec.decode(head() + b"\x83\xa4type\xa5Grant\xa6reg_id\x01" + field + b"\xff" * 4)


@pytest.mark.parametrize(
    ("example", "field", "value"),
    [
        ("Register", "legs", 0),
        ("Register", "legs", 5000),
        ("Register", "end_token", -1),
        ("Register", "start_token", 2**63),
        ("Register", "block_ids", [3, -1]),
        ("Register", "transfer_id", "x" * 513),
        ("Hello", "tp_size", 2**40),
        ("Hello", "silence_s", float("nan")),
        ("Hello", "silence_s", float("inf")),
        ("Description", "tp_size", 2**40),
        ("Abandon", "reason", "x" * 5000),
        ("Warm", "echo", b"x" * 65),
    ],
)
def test_numbers_that_would_cost_dearly_further_in_are_refused(example, field, value):
    (message,) = [one for one in EXAMPLES if type(one).__name__ == example]
    body = msgspec.msgpack.decode(codec.encode(message)[3:])
    with pytest.raises(codec.WireError, match=field):
        codec.decode(head() + msgspec.msgpack.encode({**body, field: value}))
