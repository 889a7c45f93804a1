"""What tells which way the bytes go on this machine: UCX's own tables, the kernel's RDMA devices, `fi_info`.

NIXL doesn't say which transport it took. UCX does, per operation and size, when `UCX_PROTO_INFO=y`: one table for each
peer and each kind of access, of which NIXL's transfers are the "(multi)" ones.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from kvferry.protocol.messages import Half, Route

_BLOCK = re.compile(r"\] *\|(?P<cells>.*)\| *$")
_TABLE = re.compile(r"remote memory (?P<access>read|write) by ucp_(?:get|put)\*(?P<flags>(?:\([^)]*\))*)")
_RANGE = re.compile(r"^(?P<least>\d+)(?P<unit>[KMG]?)(?:\.\.(?P<most>\d+|inf)(?P<most_unit>[KMG]?))?$")
_UNTOLD = "UCX wrote no table: the bytes went over another NIXL backend, or this UCX doesn't tell"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_RDMA = Path("/sys/class/infiniband")
_FI_INFO_S = 5.0


def half(device: str, log: Path) -> Half:
    """All of it. `log`: where UCX wrote; takes up to `_FI_INFO_S` if `fi_info` hangs."""
    ctypes.CDLL(None).fflush(None)  # UCX's log is this process's, and may be in a buffer
    text = log.read_text(errors="replace") if log.exists() else ""
    found = routes(text)
    untold = "" if found else _UNTOLD
    return Half(
        machine=platform.node(),
        device=device,
        routes=found,
        untold=untold,
        ucx_version=ucx_version(),
        rdma_devices=tuple(sorted(entry.name for entry in _RDMA.iterdir())) if _RDMA.is_dir() else (),
        efa=efa(),
    )


def routes(text: str) -> tuple[Route, ...]:
    """The latest table of each operation between this process and another, from UCX's log."""
    tables: dict[tuple[str, bool], list[Route]] = {}
    elsewhere, current = False, None
    op: Literal["GET", "PUT"] = "GET"
    for line in text.splitlines():
        match = _BLOCK.search(line)
        if not match:
            continue
        cells = [cell.strip() for cell in match["cells"].split("|")]
        if len(cells) == 1:
            table = _TABLE.search(cells[0])
            if re.search(r"cfg#\d+", cells[0]):
                elsewhere, current = " self cfg#" not in cells[0], None
            elif table and elsewhere:
                op = "GET" if table["access"] == "read" else "PUT"
                current = tables[op, "(multi)" in table["flags"]] = []
            else:
                current = None
        elif len(cells) == 3 and current is not None:
            size = _RANGE.match(cells[0])
            if size:
                least, most = _bytes(size["least"], size["unit"]), size["most"]
                if most is not None and most != "inf":
                    end: int | None = _bytes(most, size["most_unit"])
                else:
                    end = None if most else least
                current.append(Route(op=op, least=least, most=end, how=cells[1], via=cells[2]))
    chosen = [tables.get((op, True)) or tables.get((op, False), []) for op in ("GET", "PUT")]
    return tuple(route for table in chosen for route in table)


def _bytes(number: str, unit: str) -> int:
    return int(number) * _UNITS[unit]


def ucx_version() -> str:
    """Of the UCX that this process has loaded, '' if none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if os.path.basename(path).startswith("libucp"):
            library = ctypes.CDLL(path)
            library.ucp_get_version_string.restype = ctypes.c_char_p
            said: bytes = library.ucp_get_version_string()
            return said.decode()
    return ""


def efa() -> str:
    """Whether libfabric finds an EFA device: 'present', 'absent', or why that can't be told."""
    program = shutil.which("fi_info") or next(
        (path for path in ("/opt/amazon/efa/bin/fi_info",) if os.access(path, os.X_OK)), None
    )
    if program is None:
        return "not told: no fi_info here"
    try:
        done = subprocess.run([program, "-p", "efa"], capture_output=True, text=True, timeout=_FI_INFO_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not told: {error}"
    return "present" if done.returncode == 0 and "efa" in done.stdout else "absent"
