"""Many streams through one router for minutes, while clients leave and engines are killed and come back.

    python scripts/many_streams.py --minutes 5 --streams 2000 --json streams.json

Engines are stand-ins (tests/support/stand_in.py) in processes of their own, the router is `kvferry router`. Exit code 0
only if every request had a typed end, the router's memory stayed flat, and descriptors and tasks went back to what they
were before the load. Needs three descriptors per stream in the router: `ulimit -n`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import socket
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parent.parent
STAND_IN = ROOT / "tests" / "support" / "stand_in.py"
BODY = json.dumps({"model": "stand-in", "prompt": "hi", "max_tokens": 64, "stream": True}).encode()
SAMPLE_S = 1.0
LATE_S = 60.0
"""A request without an end so long after twice its usual time has none: machines that do other work are slow."""
MEMORY_SLACK = 0.05
MEMORY_SLACK_MIB = 12.0
SPARE_DESCRIPTORS = 16
SPARE_TASKS = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """One stand-in, which can be killed and started again at its address."""

    def __init__(self, role: str, events: int, pace_s: float) -> None:
        self.role = role
        self.port, self.side_port = free_port(), free_port()
        self._more = ["--events", str(events), "--pace", str(pace_s)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def spec(self) -> str:
        return f"http://127.0.0.1:{self.port},side_channel=127.0.0.1:{self.side_port}"

    async def start(self) -> None:
        where = ["--role", self.role, "--port", str(self.port), "--side-port", str(self.side_port)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(STAND_IN), *where, *self._more, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise SystemExit(f"soak: the stand-in for {self.role} on port {self.port} did not start")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Router:
    def __init__(self, log: Path) -> None:
        self.url = ""
        self._log = log

    async def start(self, engines: list[Engine], arguments: list[str]) -> None:
        line = [sys.executable, "-m", "kvferry.cli", "router", "--port", "0", *arguments]
        for engine in engines:
            line += [f"--{engine.role}", engine.spec]
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        said = (await self.process.stdout.readline()).decode()
        if not said.startswith("listening "):
            raise SystemExit(f"soak: the router did not start, see {self._log}")
        self.url = said.split()[1]
        self.facts = psutil.Process(self.process.pid)
        async with asyncio.timeout(20):
            while (await get(self.url, "/health"))[0] != 200:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.1)

    async def tasks(self) -> int:
        _, body = await get(self.url, "/metrics")
        line = next(line for line in body.decode().splitlines() if line.startswith("kvferry_router_tasks "))
        return int(float(line.split()[1]))

    def kinds(self) -> Counter[str]:
        """Of its open descriptors: socket, pipe, anon_inode:[eventfd], ..."""
        found: Counter[str] = Counter()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found[str(link.readlink()).split(":[")[0]] += 1
        return found

    async def stop(self) -> int:
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 20)


async def get(url: str, path: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), await reader.read()
    finally:
        writer.close()


@dataclass
class Tally:
    """How requests ended. `untyped`: what may not be, with what was there instead."""

    ends: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)
    events: int = 0
    at_once: int = 0
    most_at_once: int = 0

    def end(self, how: str) -> None:
        self.ends[how] += 1


class Client:
    """One of many: a request after the other, each read to its end or, some, left in the middle."""

    def __init__(self, url: str, tally: Tally, leave_share: float, usual_s: float) -> None:
        parts = urlsplit(url)
        self._where = (parts.hostname, parts.port)
        self._tally = tally
        self._leave_share = leave_share
        self._usual_s = usual_s

    async def run(self, until: float, start_after_s: float) -> None:
        await asyncio.sleep(start_after_s)
        while time.monotonic() < until:
            if not await self._request():
                await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _request(self) -> bool:
        """Whether the next may follow at once."""
        leaves = random.random() < self._leave_share
        self._tally.at_once += 1
        self._tally.most_at_once = max(self._tally.most_at_once, self._tally.at_once)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(random.uniform(0, self._usual_s) if leaves else 2 * self._usual_s + LATE_S):
                reader, writer = await asyncio.open_connection(*self._where)
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
                how = await self._read(reader)
        except TimeoutError:
            how = "left" if leaves else "untyped: no end in time"
        except (OSError, asyncio.IncompleteReadError) as error:
            how = f"untyped: {error!r}"
        finally:
            self._tally.at_once -= 1
            if writer is not None:
                writer.close()
        self._tally.end(how.split(":")[0])
        if how.startswith("untyped"):
            self._tally.untyped.append(how)
        return how in ("done", "left")

    async def _read(self, reader: asyncio.StreamReader) -> str:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if b"chunked" not in head.lower():
            return _typed(status, await reader.read())
        last = b""
        while True:
            size = int((await reader.readline()).strip() or b"0", 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                break
            self._tally.events += chunk.count(b"data: ")
            last = (last + chunk[:-2])[-4096:]
        if last.endswith(b"data: [DONE]\n\n"):
            return "done"
        return _typed(status, last.rsplit(b"data: ", 1)[-1])


def _typed(status: int, body: bytes) -> str:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return f"untyped: status {status}, {body[-200:]!r}"
    return f"{'cut' if status == 200 else status} {code}" if code else f"untyped: {body[-200:]!r}"


@dataclass
class Sample:
    second: float
    mib: float
    descriptors: int
    at_once: int


async def watch(router: Router, tally: Tally, samples: list[Sample]) -> None:
    began = time.monotonic()
    while True:
        with router.facts.oneshot():
            mib = router.facts.memory_info().rss / 2**20
        samples.append(Sample(time.monotonic() - began, mib, router.facts.num_fds(), tally.at_once))
        await asyncio.sleep(SAMPLE_S)


async def kill_in_turn(engines: list[Engine], every_s: float, down_s: float, kills: list[str]) -> None:
    while True:
        await asyncio.sleep(every_s - down_s)
        engine = engines[len(kills) % len(engines)]
        await engine.kill()
        kills.append(engine.role)
        await asyncio.sleep(down_s)
        await engine.start()


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    engines = [Engine("decode", args.events, args.pace) for _ in range(3)]
    engines += [Engine("prefill", args.events, args.pace) for _ in range(2)]
    # A prefill engine after each decode engine, so that both kinds are killed early.
    order = [engines[0], engines[3], engines[1], engines[4], engines[2]]
    router, tally, samples, kills = Router(args.log), Tally(), [], []
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        await router.start(engines, args.router_arg)
        usual_s = args.pace * args.events
        one = asyncio.create_task(Client(router.url, tally, 0.0, usual_s).run(time.monotonic() + 0.01, 0.0))
        await one  # connections, code and metrics that the first request makes
        tally = Tally()
        await asyncio.sleep(5.0)
        before = (router.facts.num_fds(), await router.tasks())
        kinds = router.kinds()
        until = time.monotonic() + args.minutes * 60
        beside = [asyncio.create_task(watch(router, tally, samples))]
        beside.append(asyncio.create_task(kill_in_turn(order, args.kill_every, args.down, kills)))
        ramp_s = min(args.pace * args.events, args.minutes * 60 / 4)
        clients = [Client(router.url, tally, args.leave, usual_s) for _ in range(args.streams)]
        await asyncio.gather(*(client.run(until, random.uniform(0, ramp_s)) for client in clients))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        after = await settled(router, before)
        kinds = router.kinds() - kinds
        code = await router.stop()
    finally:
        await asyncio.gather(*(engine.kill() for engine in engines))
        if router.url and router.process.returncode is None:
            router.process.kill()
            await router.process.wait()
    warm_s = max(ramp_s, args.warm_up * 60)
    return report(args, tally, samples, kills, before, after, warm_s, code) | {"more_descriptors": dict(kinds)}


async def settled(router: Router, before: tuple[int, int]) -> tuple[int, int]:
    """Descriptors and tasks when nothing runs any more: idle connections close within seconds, probes go on."""
    limit = time.monotonic() + 15
    while True:
        now = (router.facts.num_fds(), await router.tasks())
        back = now[0] <= before[0] + SPARE_DESCRIPTORS and now[1] <= before[1] + SPARE_TASKS
        if back or time.monotonic() > limit:
            return now
        await asyncio.sleep(0.5)


def report(
    args: argparse.Namespace,
    tally: Tally,
    samples: list[Sample],
    kills: list[str],
    before: tuple[int, int],
    after: tuple[int, int],
    warm_s: float,
    code: int,
) -> dict[str, Any]:
    steady = [sample.mib for sample in samples if sample.second > warm_s]
    third = max(1, len(steady) // 3)
    early, late = statistics.median(steady[:third]), statistics.median(steady[-third:])
    verdict = {
        "every request had a typed end": not tally.untyped,
        "memory stayed flat": late - early <= max(MEMORY_SLACK_MIB, MEMORY_SLACK * early),
        "descriptors went back": after[0] <= before[0] + SPARE_DESCRIPTORS,
        "tasks went back": after[1] <= before[1] + SPARE_TASKS,
        "the router ended cleanly": code == 0,
        "so many streams at once": tally.most_at_once >= args.streams * 0.95,
        "engines were killed": len(kills) > 0,
    }
    return {
        "streams": args.streams,
        "minutes": args.minutes,
        "requests": sum(tally.ends.values()),
        "ends": dict(tally.ends.most_common()),
        "untyped": tally.untyped[:20],
        "events": tally.events,
        "most_at_once": tally.most_at_once,
        "kills": dict(Counter(kills)),
        "router_mib": {
            "early_median": round(early, 1),
            "late_median": round(late, 1),
            "most": round(max(sample.mib for sample in samples), 1),
            "every_10_s": [round(sample.mib, 1) for sample in samples[:: round(10 / SAMPLE_S)]],
        },
        "descriptors": {"before": before[0], "most": max(one.descriptors for one in samples), "after": after[0]},
        "tasks": {"before": before[1], "after": after[1]},
        "verdict": verdict,
        "ok": all(verdict.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    warm = "before memory is looked at: each coincidence of kills that is the worst so far raises its high water"
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="MINUTES", help=warm)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--events", type=int, default=12, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds between two tokens (default: %(default)s)")
    parser.add_argument("--leave", type=float, default=0.01, help="share of clients that leave (default: %(default)s)")
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds (default: %(default)s)")
    parser.add_argument("--down", type=float, default=3.0, help="seconds until it is back (default: %(default)s)")
    parser.add_argument("--router-arg", action="append", default=[], help="for `kvferry router`; can be repeated")
    parser.add_argument("--log", type=Path, default=Path("soak-router.log"), help="the router's (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the same facts there")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < args.streams * 3 + 200:
        raise SystemExit(f"soak: {args.streams} streams need {args.streams * 3 + 200} descriptors, the limit is {hard}")
    facts = asyncio.run(soak(args))
    text = json.dumps(facts, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
