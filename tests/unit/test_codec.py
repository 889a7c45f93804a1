from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol import codec
from kvferry.protocol import messages as wire

PLANE = wire.Plane(base=2**47, block_stride=4096, head_stride=512, token_bytes=256)
LAYOUT = wire.Layout(
    planes=(PLANE, PLANE),
    num_blocks=9,
    block_size=16,
    heads=2,
    total_heads=4,
    divisible=True,
    device="cpu",
    fingerprint={"model": "m"},
)
GREETING = dict(
    life=2**62, engine_id="e", rank=1, tp_size=2, layout=LAYOUT, agent=b"\0\xff", scratch=2**47, silence_s=30.0
)
POINT = wire.Point(op="GET", scattered=True, nbytes=4096, median_s=2e-5, fastest_s=1e-5, repeats=3)
HALF = wire.Half(
    machine="m",
    device="cpu",
    routes=(wire.Route(op="PUT", least=0, most=None, how="zero-copy", via="cma/memory"),),
    untold="",
    ucx_version="1.21.0",
    rdma_devices=("mlx5_0",),
    efa="absent",
)
REACH = wire.Reach(agent=b"\0\xff", base=2**47, device="cuda:1")
EXAMPLES: list[wire.Message] = [
    wire.Hello(dialled="p.example:5600", **GREETING),
    wire.Welcome(**GREETING),
    wire.Warm(),
    wire.Refuse(code="c", reason="r"),
    wire.Beat(),
    wire.Register(reg_id=1, transfer_id="t", mode="push", start_token=0, end_token=7, block_ids=(3, 1), legs=1),
    wire.Waiting(transfer_id="t"),
    wire.Cancel(reg_id=1, reason="r"),
    wire.Fetched(reg_id=1, ok=True),
    wire.Begin(reg_id=1, sealed=True),
    wire.Seal(reg_id=1, end_token=40, attempt=2),
    wire.Watch(transfer_id="t", percent=50),
    wire.Reached(transfer_id="t", tokens=20, of=40, ended=False),
    wire.Grant(reg_id=1, block_ids=(1, 2)),
    wire.Landed(reg_id=1, nbytes=2**40, descriptors=3),
    wire.Failed(reg_id=1, code="c", reason="ü"),
    wire.Describe(),
    wire.Description(
        engine_id="e", life=1, rank=0, tp_size=1, role="both", mode="pull", block_size=16, version="0.1.0"
    ),
    wire.Abandon(transfer_id="t", reason="r"),
    wire.Abandoned(transfer_id="t", known=False),
    wire.Why(transfer_id="t"),
    wire.Verdict(transfer_id="t", state="ok", code="", reason=""),
    wire.Inspect(),
    wire.Inspection(
        engine_id="e",
        life=1,
        rank=0,
        tp_size=1,
        role="both",
        mode="pull",
        background=True,
        layout=LAYOUT,
        backends=("UCX",),
        versions={"kvferry": "0.1.0"},
        machine="m",
        wall_s=1.5e9,
    ),
    wire.Probe(host="h", port=5600, sizes=(4096, 8192), piece=4096, limit_s=9.5),
    wire.Probed(failure="", points=(POINT,), decode=HALF, prefill=HALF),
    wire.ProbeTarget(probe_id="p", reach=REACH, sizes=(4096,), piece=4096, limit_s=9.5),
    wire.ProbeReady(probe_id="p", reach=REACH),
    wire.ProbeNext(probe_id="p"),
    wire.ProbeTimes(probe_id="p", points=(POINT,), half=HALF),
    wire.ProbeFailed(probe_id="p", reason="r"),
]


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
