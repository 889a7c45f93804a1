#!/bin/sh
# Ends what serve_pd.sh (server) or run_sweep.sh (proxy: the router) started on this machine and left running.
#
#   scripts/cleanup.sh proxy|server
#
# Nothing that these scripts have not started is touched. Nothing there: says so, and is no failure.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/pd_common.sh"

[ $# = 1 ] || fail "say what to end: proxy or server"
one_of "what to end" "$1" proxy server
[ -d "$RUN_DIR" ] || { echo "no $1 runs"; exit 0; }
exec "$PYTHON" - "$RUN_DIR" "$1" <<'PYTHON'
import sys
import time
from pathlib import Path

import psutil


def alive(processes) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def ours(pid: int, started: float, marker: str) -> list[psutil.Process]:
    """The process, if it is still this very one, its descendants, and what else carries the marker."""
    found = {}
    try:
        leader = psutil.Process(pid)
        if abs(leader.create_time() - started) < 0.05:
            found |= {process.pid: process for process in [leader, *leader.children(recursive=True)]}
    except psutil.Error:
        pass
    for process in psutil.process_iter():
        try:
            if process.environ().get("KVFERRY_TREE") == marker:
                found[process.pid] = process
        except psutil.Error:
            continue
    return alive(found.values())


def send(processes, signal: str) -> None:
    for process in processes:
        try:
            getattr(process, signal)()
        except psutil.Error:
            continue


def left(everything, who, seconds: float) -> list[psutil.Process]:
    """What still runs of these, or of what they started meanwhile, at the latest after so long."""
    until = time.monotonic() + seconds
    while True:
        found = {process.pid: process for process in [*alive(everything), *ours(*who)]}
        if not found or time.monotonic() > until:
            return list(found.values())
        time.sleep(0.1)


ended, damaged = [], []
for path in sorted(Path(sys.argv[1]).glob(f"{sys.argv[2]}*")):
    try:
        number, start, marker = path.read_text().split()
        who = (int(number), float(start), marker)
    except ValueError:
        damaged.append(str(path))
        continue
    everything = ours(*who)
    if everything:
        leader = [process for process in everything if process.pid == who[0]]
        send(leader or everything, "terminate")
        send(left(everything, who, 15), "kill")
        stubborn = left(everything, who, 5)
        if stubborn:
            sys.exit(f"cleanup.sh: error: still running: {', '.join(str(process.pid) for process in stubborn)}")
        ended.append(path.name)
    path.unlink()
if damaged:
    sys.exit(f"cleanup.sh: error: damaged: {', '.join(damaged)}: end what runs by hand, then remove the file")
print(f"ended: {', '.join(ended)}" if ended else f"no {sys.argv[2]} runs")
PYTHON
