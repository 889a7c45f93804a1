"""What a probe of one pair of ranks says: which transport, how fast each way. Pure."""

from __future__ import annotations

import re
from statistics import median
from typing import Literal

import msgspec

from kvferry.doctor.findings import Finding, fail, ok, warn
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Half, Layout, Point, Probed, Route

Op = Literal["GET", "PUT"]
OPS: tuple[Op, ...] = ("GET", "PUT")

SLOWER = 3.0
"""One direction this many times slower than the other is a fault of the path, not of its nature."""
_LARGE = 1 << 20
"""Directions are compared from this size on: below, the round trip is all that is measured."""

TRANSPORTS = ("shm", "tcp", "rdma", "efa", "cuda_ipc", "gpu")
_FAMILIES = (
    (r"cuda_ipc|rocm_ipc|ze_ipc", "cuda_ipc"),
    (r"srd\b|efa", "efa"),
    (r"rc_|dc_|ud_|rc\b|dc\b|ud\b|gga|ib\b", "rdma"),
    (r"tcp", "tcp"),
    (r"sysv|posix|cma|xpmem|knem|self|mm\b", "shm"),
    (r"cuda_copy|gdr_copy|rocm_copy|cuda|gdr|rocm", "gpu"),
)
_ACTION = {"GET": "read by decode", "PUT": "written by prefill"}


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of ranks that carries KV, and what its probe found (None: it was not made)."""

    prefill: str
    decode: str
    p_rank: int
    d_rank: int
    share: HeadShare | None
    src: Layout
    dst: Layout
    probed: Probed

    @property
    def name(self) -> str:
        return f"{self.prefill} rank {self.p_rank} -> {self.decode} rank {self.d_rank}"

    def series(self, op: Op, scattered: bool) -> list[Point]:
        """By size."""
        found = [point for point in self.probed.points if point.op == op and point.scattered == scattered]
        return sorted(found, key=lambda point: point.nbytes)


def judge(way: Way, expected: str) -> list[Finding]:
    """`expected`: a transport that the user named, or ''."""
    if way.probed.failure:
        todo = "correct what it names and run the doctor again; the engines' logs have the same line"
        return [fail("probe", way.name, way.probed.failure, todo)]
    findings = [_transport(way, op, expected) for op in OPS]
    return [*findings, _balance(way), *_speeds(way)]


def side(way: Way, op: Op) -> Half | None:
    """Who posts it, and so knows which way it goes."""
    return way.probed.decode if op == "GET" else way.probed.prefill


def family(via: str) -> str:
    """The kind of transport behind UCX's words, such as `rc_mlx5/mlx5_0:1`; the slowest, where it names several."""
    names = re.findall(r"([a-z][\w-]*)/", via) or re.findall(r"[a-z][\w-]*", via)
    kinds = {next((kind for pattern, kind in _FAMILIES if re.match(pattern, name)), name) for name in names}
    return next((kind for kind in ("tcp", "gpu", "shm", "rdma", "efa", "cuda_ipc") if kind in kinds), "other")


def routes_of(way: Way, op: Op) -> list[Route]:
    half = side(way, op)
    return [route for route in half.routes if route.op == op] if half else []


def main_route(way: Way, op: Op) -> Route | None:
    """The one that large transfers take."""
    return next((route for route in routes_of(way, op) if route.most is None or route.most >= _LARGE), None)


def _transport(way: Way, op: Op, expected: str) -> Finding:
    check, half, route = f"transport of {op}", side(way, op), main_route(way, op)
    if half is None or route is None:
        said = f"unknown: {half.untold if half and half.untold else 'UCX named no way for large transfers'}"
        said += f"; EFA on this machine: {half.efa}" if half else ""
        if not expected:
            return ok(check, way.name, said)
        return warn(check, way.name, said, f"{expected} was expected and can't be confirmed: compare the bandwidth")
    kind = family(route.via)
    said = f"{kind}: {route.via}, {route.how} ({_ACTION[op]})"
    if expected:
        if kind == expected:
            return ok(check, way.name, said)
        return warn(check, way.name, f"{said}, but {expected} was expected", _better(half, kind))
    if kind == "tcp":
        said = f"TCP IS USED: {route.via}, {route.how} ({_ACTION[op]})"
        return warn(check, way.name, said, f"{_better(half, kind)}; if TCP is meant: --expect-transport tcp")
    if kind == "gpu" or (route.how == "software emulation" and kind != "tcp"):
        return warn(check, way.name, f"{said}: copies through host memory", _better(half, kind))
    return ok(check, way.name, said)


def _better(half: Half, kind: str) -> str:
    """What may be wrong, from what the machine has."""
    if half.efa == "present":
        return 'EFA is there: "backends": ["LIBFABRIC"] in kv_connector_extra_config of both engines'
    if half.rdma_devices:
        devices = ", ".join(half.rdma_devices)
        return f"RDMA devices are there ({devices}): look at UCX_TLS and UCX_NET_DEVICES in the engines' environment"
    if kind == "tcp":
        return "no RDMA device on this machine; on one machine UCX_TLS must not leave out sm (GPUs: cuda_ipc)"
    return "look at UCX_TLS in the engines' environment"


def get_over_put(way: Way) -> float | None:
    """How much longer a GET takes than a PUT: median over the large sizes, whole and scattered, by the fastest of each,
    since other work on the machine disturbs the others. None where no large ones could be measured."""
    ratios = [
        get.fastest_s / put.fastest_s
        for scattered in (False, True)
        for get, put in zip(way.series("GET", scattered), way.series("PUT", scattered), strict=False)
        if get.nbytes == put.nbytes and get.nbytes >= _LARGE
    ]
    return median(ratios) if ratios else None


def _balance(way: Way) -> Finding:
    check, ratio = "GET against PUT", get_over_put(way)
    if ratio is None:
        todo = "run the doctor again; if it stays so, the path is too slow to carry a megabyte in seconds"
        return fail(check, way.name, "no transfer of 1 MiB or more fitted into the probe's time", todo)
    slow, fast, times = ("GET", "PUT", ratio) if ratio >= 1 else ("PUT", "GET", 1 / ratio)
    said = f"{slow} takes {times:.1f} times as long as {fast}"
    if times <= SLOWER:
        return ok(check, way.name, said)
    mode = "push" if slow == "GET" else "pull"
    todo = f"GET goes over {_via(way, 'GET')}, PUT over {_via(way, 'PUT')}: put the slow one right, or use {mode} only"
    return fail(check, way.name, f"SLOW {slow}: {said}", todo)


def _via(way: Way, op: Op) -> str:
    route = main_route(way, op)
    return f"{route.via} ({route.how})" if route else "what UCX doesn't tell"


def _speeds(way: Way) -> list[Finding]:
    """Latency of the smallest, bandwidth of the largest; for information."""
    out = []
    for op in OPS:
        whole, pieces = way.series(op, False), way.series(op, True)
        parts = [f"{bytes_text(whole[0].nbytes)} in {seconds_text(whole[0].median_s)}"] if whole else []
        for name, series in (("in one piece", whole), ("in pieces", pieces)):
            if series:
                last = series[-1]
                parts.append(f"{bytes_text(last.nbytes)} {name} at {rate_text(last.nbytes / last.median_s)}")
        out.append(ok(f"speed of {op}", way.name, ", ".join(parts)))
    return out


def bytes_text(nbytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rate_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"
