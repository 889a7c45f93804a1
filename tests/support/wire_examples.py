"""One message of each type, and what becomes of them in the hands of somebody hostile."""

from __future__ import annotations

from typing import Any

import msgspec
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
    life=2**62,
    engine_id="e",
    rank=1,
    tp_size=2,
    layout=LAYOUT,
    agent=b"\0\xff",
    scratch=2**47,
    silence_s=30.0,
    pull_by="auto",
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
    wire.Warm(echo=b"e"),
    wire.Look(),
    wire.Looked(alone=True, over=True),
    wire.Refuse(code="c", reason="r"),
    wire.Beat(),
    wire.Register(
        reg_id=1, transfer_id="t", mode="push", start_token=0, end_token=7, block_ids=(3, 1), legs=1, credit=4
    ),
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
    wire.StageAsk(
        stage_id=1, reg_id=2, start_token=0, end_token=7, first_plane=0, end_plane=None, slots=4, slot_bytes=2**21
    ),
    wire.StageLent(stage_id=1, slots=(2**47, 2**47 + 2**21)),
    wire.Staged(stage_id=1, slot=3, first=256, count=256),
    wire.Unstaged(stage_id=1, slot=3),
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

_NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 9, 10, 15, 16, 17, 1000, 2**31, 2**40, 2**62, 2**64 - 1, -1, 0.0, 1e300])
_WORDS = st.sampled_from(["", "t", "a", "P", "D", "push", "pull", "stream", "cpu", "cuda:0", "\0", "x" * 600])
_VALUES = st.one_of(
    _NUMBERS,
    _WORDS,
    st.none(),
    st.booleans(),
    st.binary(max_size=20),
    st.lists(_NUMBERS, max_size=6),
    st.dictionaries(_WORDS, _WORDS, max_size=2),
)


_ANY = st.sampled_from(EXAMPLES)


@st.composite
def mutated(draw: Any, of: Any = _ANY) -> bytes:
    """A valid message, or one with other values in some fields; some of those pass the codec. Sometimes its bytes are
    cut, or changed."""
    message = draw(of)
    body = msgspec.msgpack.decode(codec.encode(message)[3:])
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=2)):
        value = draw(_VALUES)
        if isinstance(body[name], list) and body[name] and isinstance(body[name][0], dict) and isinstance(value, int):
            body[name] = [{**one, draw(st.sampled_from(sorted(one))): value} for one in body[name]]
        elif isinstance(body[name], dict) and draw(st.booleans()):
            body[name] = {**body[name], draw(st.sampled_from([*sorted(body[name]), "novelty"])): value}
        else:
            body[name] = value
    data = codec.MAGIC + bytes([codec.VERSION]) + msgspec.msgpack.encode(body)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data
