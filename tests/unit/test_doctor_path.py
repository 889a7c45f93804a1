"""Transports, directions, predictions and verdicts, from measured points that are given."""

from __future__ import annotations

import pytest
from doctor_parts import LAYOUT
from msgspec.structs import replace

from kvferry.doctor.findings import exit_code, fail, ok, warn
from kvferry.doctor.path import Way, family, get_over_put, judge
from kvferry.doctor.predict import advise, amount, duration, per_descriptor, predict
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Half, Point, Probed, Route

SIZES = tuple(4096 << 2 * i for i in range(8))
SHARE = HeadShare(p_rank=0, src_head_start=0, dst_head_start=0, count=4)


def points(op, bytes_per_s, piece_s, latency_s=20e-6):
    for scattered in (False, True):
        for size in SIZES:
            seconds = latency_s + size / bytes_per_s + (size // 4096 * piece_s if scattered else 0)
            yield Point(op=op, scattered=scattered, nbytes=size, median_s=seconds, fastest_s=seconds, repeats=3)


def half(via="cma/memory", how="zero-copy", **fields):
    routes = tuple(Route(op=op, least=0, most=None, how=how, via=via) for op in ("GET", "PUT")) if via else ()
    base = Half(
        machine="m", device="cpu", routes=routes, untold="" if via else "nobody tells", ucx_version="1",
        rdma_devices=(), efa="absent",
    )  # fmt: skip
    return replace(base, **fields)


def way(get=1e9, put=1e9, decode=None, prefill=None, layout=LAYOUT, piece_s=1e-6):
    layout = replace(
        layout, num_blocks=4096, planes=tuple(replace(p, base=i << 40) for i, p in enumerate(layout.planes))
    )
    return Way(
        prefill="p",
        decode="d",
        p_rank=0,
        d_rank=0,
        share=SHARE,
        src=layout,
        dst=layout,
        probed=Probed(
            failure="",
            points=(*points("GET", get, piece_s), *points("PUT", put, piece_s)),
            decode=decode or half(),
            prefill=prefill or half(),
        ),
    )


def found(one, expected=""):
    return {finding.check: finding for finding in judge(one, expected)}


@pytest.mark.parametrize(
    ("via", "kind"),
    [
        ("cma/memory", "shm"),
        ("sysv/memory", "shm"),
        ("52% on tcp/lo and 48% on tcp/eth0", "tcp"),
        ("rc_mlx5/mlx5_0:1", "rdma"),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0", "tcp"),
        ("ud_verbs/bnxt:1", "rdma"),
        ("srd/rdmap0:1", "efa"),
        ("cuda_ipc/cuda", "cuda_ipc"),
        ("cuda_copy/cuda", "gpu"),
        ("novel/x", "other"),
    ],
)
def test_families(via, kind):
    assert family(via) == kind


def test_tcp_is_a_loud_warning_unless_meant():
    one = way(decode=half("tcp/eth0", "software emulation"))
    checks = found(one)
    assert checks["transport of GET"].status == "warn" and "TCP IS USED" in checks["transport of GET"].said
    assert checks["transport of PUT"].status == "ok"
    assert found(one, "tcp")["transport of GET"].status == "ok"
    assert found(one, "tcp")["transport of PUT"].status == "warn"  # not what was expected, either
    with_card = way(decode=half("tcp/eth0", rdma_devices=("mlx5_0",)))
    assert "mlx5_0" in found(with_card)["transport of GET"].todo
    assert "LIBFABRIC" in found(way(decode=half("tcp/eth0", efa="present")))["transport of GET"].todo


def test_what_is_not_told_is_unknown_with_its_reason():
    one = way(decode=half(""))
    assert found(one)["transport of GET"].status == "ok"
    assert "unknown: nobody tells; EFA on this machine: absent" in found(one)["transport of GET"].said
    assert found(one, "rdma")["transport of GET"].status == "warn"


@pytest.mark.parametrize(
    ("get", "put", "status", "says"),
    [
        (1e9, 1e9, "ok", "1.0 times"),
        (1e9, 2.9e9, "ok", "GET takes"),
        (5e7, 49e9, "FAIL", "SLOW GET"),
        (49e9, 5e7, "FAIL", "SLOW PUT"),
    ],
)
def test_directions_are_compared(get, put, status, says):
    finding = found(way(get, put, piece_s=0.0))["GET against PUT"]
    assert finding.status == status and says in finding.said
    if status == "FAIL":
        assert "cma/memory (zero-copy)" in finding.todo and ("push only" in finding.todo) == (says == "SLOW GET")


def test_a_probe_that_measured_nothing_large_or_nothing_at_all_fails():
    one = way()
    small = tuple(point for point in one.probed.points if point.nbytes < 1 << 20)
    short = replace(one, probed=replace(one.probed, points=small))
    assert get_over_put(short) is None and found(short)["GET against PUT"].status == "FAIL"
    (failed,) = judge(replace(one, probed=Probed(failure="refused because")), "")
    assert (failed.status, failed.check, failed.said) == ("FAIL", "probe", "refused because")


def test_interpolation_between_and_beyond_what_was_measured():
    whole = [one for one in points("PUT", 1e9, 0) if not one.scattered]
    assert duration(whole, 1) == pytest.approx(20e-6 + 4096e-9)
    for nbytes in (5000, 1 << 20, 3 << 20, 1 << 30):
        assert duration(whole, nbytes) == pytest.approx(20e-6 + nbytes / 1e9)
    pieces = [one for one in points("PUT", 1e9, 2e-6) if one.scattered]
    assert per_descriptor(whole, pieces) == pytest.approx(2e-6)
    assert per_descriptor(pieces, whole) == 0.0


def test_amounts_come_from_the_planner():
    one = way()
    # 2 planes x 4 heads x 64 bytes; at best one region per plane, at worst one per plane and block
    assert amount(one, 16_000) == (16_000 * 512, 2, 2 * 1000)
    half_of_the_heads = replace(one, share=replace(SHARE, count=2))
    # two neighbouring heads of a block are one region; blocks are apart in any case
    assert amount(half_of_the_heads, 16_000) == (16_000 * 256, 2000, 2000)
    tiny = replace(one, src=replace(one.src, num_blocks=1), dst=replace(one.dst, num_blocks=1))
    assert amount(tiny, 100)[0] == 7 * 16 * 512


def test_prediction_is_the_slowest_pair_and_sums_the_bytes():
    fast, slow = way(put=1e9), way(put=1e8)
    get, put = predict([fast, slow], 16_000)
    nbytes = 16_000 * 512
    assert (get.op, put.op, put.total_bytes) == ("GET", "PUT", 2 * nbytes)
    assert put.best_s == pytest.approx(20e-6 + nbytes / 1e8 + 2e-6, rel=1e-3)
    assert put.worst_s == pytest.approx(20e-6 + nbytes / 1e8 + 2000e-6, rel=1e-3)
    assert predict([replace(fast, probed=Probed(failure="x"))], 1) == [] == predict([], 1)


@pytest.mark.parametrize(
    ("get", "put", "ttft_ms", "verdict", "disappoints"),
    [
        (1e9, 1e9, None, "push", False),
        (1e9, 1e9, 1000.0, "push", False),
        (1e9, 2e8, 1000.0, "pull", False),  # GET is clearly the faster way
        (1e9, 8e8, 1000.0, "push", False),  # not clearly
        (1e8, 1e8, 100.0, "stay colocated", True),  # 82 ms of 100 at best
        (1e9, 1e9, 17.5, "push", True),  # 8.2 ms at best, 10.2 at worst, of 8.75
    ],
)
def test_verdicts(get, put, ttft_ms, verdict, disappoints):
    ways = [way(get, put)]
    advice = advise(ways, predict(ways, 16_000), ttft_ms)
    assert (advice.verdict, advice.disappoints) == (verdict, disappoints), advice.reason
    assert "16000 tokens" in advice.reason


def test_exit_codes():
    fine, meh, broken = ok("a", "b", "c"), warn("a", "b", "c", "d"), fail("a", "b", "c", "d")
    assert [exit_code(some) for some in ([], [fine], [fine, meh], [broken, fine, meh])] == [0, 0, 1, 2]
