"""The doctor over ranks in processes of their own, real NIXL and ZMQ: each fault is found, named, and ends with 2."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager

import psutil
import pytest
from doctor_tier import Ranks
from nixl_tier import free_port

from kvferry.cli import main

pytest.importorskip("nixl_cu12")
pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


@contextmanager
def pair(p=None, d=None, **both):
    """Two engines; `p` and `d` are what each has of its own."""
    engines = [
        Ranks("prefill-0", "producer", **{**both, **(p or {})}),
        Ranks("decode-0", "consumer", **{**both, **(d or {})}),
    ]
    try:
        for engine in engines:
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def doctor(tmp_path, capsys):
    """Runs it; (exit code, checks by name, whole report)."""

    def run(prefill, decode, *options):
        file = tmp_path / "doctor.json"
        code = main(["doctor", "--prefill", prefill, "--decode", decode, "--json", str(file), *options])
        print(capsys.readouterr().out)
        report = json.loads(file.read_text())
        assert report["exit_code"] == code
        by_name = {}
        for check in report["checks"]:
            by_name.setdefault(check["check"], []).append(check)
        return code, by_name, report

    return run


def nothing_runs(*engines):
    """Both halves of the probe end soon, and nothing is left of them."""
    until = time.monotonic() + 10
    pids = [child.process.pid for engine in engines for child in engine.children]
    while any(psutil.Process(pid).children() for pid in pids):
        assert time.monotonic() < until, "a probe goes on"
        time.sleep(0.05)


def failed(checks):
    """What FAILed: each says what to do."""
    found = [one for same in checks.values() for one in same if one["status"] == "FAIL"]
    assert all(one["todo"] for one in found)
    return {one["check"]: one["said"] for one in found}


def test_healthy_pair_over_shared_memory_is_fine(doctor):
    with pair(ucx_tls="tcp,self,sm") as (p, d):
        code, checks, report = doctor(p.where, d.where, "--prompt-tokens", "16000", "--ttft", "60000")
        assert (code, failed(checks)) == (0, {})
        ranks = report["pairs"][0]["ranks"]
        assert {(one["op"], one["scattered"]) for one in ranks[0]["points"]} == {
            (op, scattered) for op in ("GET", "PUT") for scattered in (False, True)
        }
        assert {one["nbytes"] for one in ranks[0]["points"]} == {4096 << 2 * i for i in range(8)}
        for op in ("GET", "PUT"):
            assert checks[f"transport of {op}"][0]["said"].startswith("shm: ")
        assert report["pairs"][0]["verdict"] in ("push", "pull")
        # 4 planes x 4 heads x 64 bytes for each token
        assert [one["total_bytes"] for one in report["pairs"][0]["predictions"]] == [16000 * 1024] * 2
        assert all(0 < one["best_s"] <= one["worst_s"] < 30 for one in report["pairs"][0]["predictions"])
        nothing_runs(p, d)


def test_tcp_is_warned_of_unless_it_was_meant_and_a_hopeless_objective_is_told(doctor):
    with pair() as (p, d):
        code, checks, report = doctor(p.where, d.where, "--prompt-tokens", "4000000", "--ttft", "1")
        assert code == 1 and not failed(checks)
        for op in ("GET", "PUT"):
            (one,) = checks[f"transport of {op}"]
            assert one["status"] == "warn" and "TCP IS USED" in one["said"] and "--expect-transport tcp" in one["todo"]
        assert checks["time to first token"][0]["status"] == "warn"
        assert report["pairs"][0]["verdict"] == "stay colocated"

        code, checks, _ = doctor(p.where, d.where, "--expect-transport", "tcp")
        assert (code, failed(checks)) == (0, {})
        code, checks, _ = doctor(p.where, d.where, "--expect-transport", "rdma")
        assert code == 1 and "rdma was expected" in checks["transport of GET"][0]["said"]


def test_closed_side_channel(doctor):
    with pair() as (p, _):
        began = time.monotonic()
        code, checks, _ = doctor(p.where, f"127.0.0.1:{free_port()}")
        assert code == 2 and "nothing listens there" in failed(checks)["side channel"]
        assert time.monotonic() - began < 10


def test_silent_port_and_unknown_host(doctor):
    import socket

    with pair() as (p, _), socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        began = time.monotonic()
        code, checks, _ = doctor(p.where, f"127.0.0.1:{deaf.getsockname()[1]}")
        assert time.monotonic() - began < 10
        assert code == 2 and "takes connections but does not answer" in failed(checks)["side channel"]


def test_an_idle_engine_that_transfers_inline_is_examined_as_well(doctor):
    with pair(config={"mode": "pull"}, d={"config": {"mode": "pull", "background": False}}) as (p, d):
        code, checks, report = doctor(p.where, d.where, "--expect-transport", "tcp")
    assert (code, failed(checks)) == (0, {})
    assert [engine["background"] for engine in report["engines"]] == [True, False]


FAULTS = {
    "other model": ({"fingerprint": {"model": "other#2"}}, {}, "model", "m#1"),
    "other dtype": ({"fingerprint": {"kv_cache_dtype": "float8"}}, {}, "dtype", "kv_cache_dtype differs"),
    "block sizes that don't divide": ({"block_size": 24}, {}, "block size", "block_size differs"),
    "mode mismatch": ({"config": {"mode": "pull"}}, {}, "mode", "prefill has push, decode has pull"),
    "slow GET": ({"slow_get": 10.0}, {"ucx_tls": "tcp,self,sm"}, "GET against PUT", "SLOW GET"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_pair_is_the_only_one_named(doctor, name):
    decode, both, check, says = FAULTS[name]
    with pair(d=decode, **both) as (p, d):
        code, checks, report = doctor(p.where, d.where)
    assert code == 2
    found = failed(checks)
    assert list(found) == [check] and says in found[check]
    assert report["pairs"][0]["verdict"] == "broken"


def test_wrong_tp_size_is_named_on_either_side(doctor):
    with pair() as (p, d):
        code, checks, _ = doctor(f"{p.where},tp=2", d.where)
        assert code == 2 and "wrong TP size: told tp=2, the engine has 1" in failed(checks)["TP size"]


def test_ranks_of_unequal_tp_are_all_probed_and_a_plan_that_cannot_be_is_named(doctor):
    with pair(d={"tp": 2}) as (p, d):
        code, checks, report = doctor(p.where, d.where, "--expect-transport", "tcp")
        assert (code, failed(checks)) == (0, {})
        ranks = report["pairs"][0]["ranks"]
        assert [(one["prefill_rank"], one["decode_rank"], one["failure"]) for one in ranks] == [(0, 0, ""), (0, 1, "")]
        # one prompt's bytes are what the two take together
        assert report["pairs"][0]["predictions"][0]["total_bytes"] == 8000 * 1024
    with pair(d={"tp": 3}) as (p, d):
        code, checks, _ = doctor(p.where, d.where)
        assert code == 2 and "total_heads=4 cannot be placed on tp=3" in failed(checks)["TP plan"]


def test_one_probe_at_a_time_and_an_engine_outlives_probes(doctor):
    """A probe whose other half dies, one that is refused, one that nobody waits for; then one that works."""
    import asyncio

    from kvferry.errors import PeerUnreachable
    from kvferry.protocol.messages import Probe
    from kvferry.transfer import inquiry

    with pair() as (p, d):
        question = Probe(host="127.0.0.1", port=p.port, sizes=(4096, 1 << 20), piece=4096, limit_s=30.0)

        async def two():
            return await asyncio.gather(*(inquiry.probe("127.0.0.1", d.port, question, 40.0) for _ in range(2)))

        answers = asyncio.run(two())
        assert sorted(one.failure == "" for one in answers) == [False, True]
        assert "another probe under way" in next(one.failure for one in answers if one.failure)

        nowhere = Probe(host="127.0.0.1", port=free_port(), sizes=(4096,), piece=4096, limit_s=30.0)
        answer = asyncio.run(inquiry.probe("127.0.0.1", d.port, nowhere, 20.0))
        assert "cannot be reached from here" in answer.failure

        async def killed():
            asking = asyncio.create_task(inquiry.probe("127.0.0.1", d.port, question, 40.0))
            half = psutil.Process(p.children[0].process.pid)
            while not half.children():
                await asyncio.sleep(0.01)
            half.children()[0].kill()
            return await asking

        assert "ended with code -9" in asyncio.run(killed()).failure

        with pytest.raises(PeerUnreachable, match="did not answer within"):
            asyncio.run(inquiry.probe("127.0.0.1", d.port, question, 0.3))
        nothing_runs(p, d)

        code, checks, _ = doctor(p.where, d.where, "--expect-transport", "tcp")
        assert (code, failed(checks)) == (0, {})


def test_an_engine_that_ends_takes_its_probe_with_it():
    import asyncio

    from kvferry.protocol.messages import Probe
    from kvferry.transfer import inquiry

    with pair() as (p, d):
        question = Probe(host="127.0.0.1", port=p.port, sizes=(1 << 26,), piece=4096, limit_s=30.0)
        pid = d.children[0].process.pid

        async def half_pid():
            asking = asyncio.create_task(inquiry.probe("127.0.0.1", d.port, question, 5.0))
            while not (halves := psutil.Process(pid).children()):
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return halves[0].pid

        half = asyncio.run(half_pid())
        os.kill(pid, 9)
        d.children[0].process.join()
        until = time.monotonic() + 10
        while psutil.pid_exists(half):
            assert time.monotonic() < until
            time.sleep(0.05)
        d.children.clear()
