"""Whether a prefill and a decode engine can exchange KV, judged by what they said, with the functions that judge it
when they meet. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kvferry.doctor.findings import Finding, fail, ok, warn
from kvferry.doctor.target import Target
from kvferry.errors import CompatError
from kvferry.protocol.layout import HeadShare, check_compatible, fan_in, legs_for
from kvferry.protocol.messages import Inspection, Layout

Ranks = Mapping[int, Inspection]

_CANNOT = {"prefill": "consumer", "decode": "producer"}
_DTYPES = ("dtype", "kv_cache_dtype")
_APART_S = 0.5


def judge_one(target: Target, ranks: Ranks) -> list[Finding]:
    """One engine against what the command line says of it."""
    about = ranks[0]
    where = f"{target.role} {about.engine_id}"
    findings = []
    if about.role == _CANNOT[target.role]:
        todo = f"swap --prefill and --decode, or start it with another kv_role than kv_{about.role}"
        findings.append(fail("role", where, f"it runs as kv_{about.role}", todo))
    else:
        findings.append(ok("role", where, f"kv_{about.role}"))
    if target.tp and target.tp != about.tp_size:
        said = f"wrong TP size: told tp={target.tp}, the engine has {about.tp_size}"
        todo = f"write tp={about.tp_size}, or is this another engine's side channel?"
        findings.append(fail("TP size", where, said, todo))
    if target.engine_id and target.engine_id != about.engine_id:
        said = f"told engine_id={target.engine_id}, the side channel says {about.engine_id}"
        findings.append(fail("engine id", where, said, "is this another engine's side channel?"))
    return findings


def judge_pair(prefill: Ranks, decode: Ranks) -> list[Finding]:
    """Two engines, all ranks of which are known."""
    p, d = prefill[0], decode[0]
    where = f"{p.engine_id} -> {d.engine_id}"
    findings = [_mode(where, p, d), _versions(where, p, d)]
    findings += _layouts(where, prefill, decode)
    findings.append(_plan(where, prefill, decode))
    return findings


def judge_models(where: str, prefill: list[str] | None, decode: list[str] | None) -> list[Finding]:
    """The names under which the two serve over HTTP: a client's request goes to both with one name."""
    if prefill is None or decode is None or set(prefill) & set(decode):
        return []
    said = f"prefill serves {', '.join(prefill)}, decode {', '.join(decode)}"
    return [fail("served model name", where, said, "start both with the same --served-model-name")]


def judge_clock(name: str, ahead_s: float, give_or_take_s: float) -> Finding:
    """A clock against this machine's. Transfers need no common clock; stories are sorted by it."""
    said = f"{abs(ahead_s) * 1e3:.1f} ms {'ahead of' if ahead_s >= 0 else 'behind'} this machine's, give or take "
    said += f"{give_or_take_s * 1e3:.1f} ms"
    if abs(ahead_s) - give_or_take_s > _APART_S:
        said += "; transfers don't mind, `kvferry story` over several machines would be out of order"
    return ok("clock", name, said)


def shares(prefill: Ranks, decode: Ranks) -> list[tuple[int, HeadShare]]:
    """(decode rank, what it takes from which prefill rank) of all that take something. Raises `CompatError`."""
    p, d = prefill[0], decode[0]
    every = [(rank, share) for rank in decode for share in fan_in(rank, d.tp_size, p.tp_size, d.layout.total_heads)]
    return [(rank, share) for rank, share in every if share.count]


def _mode(where: str, p: Inspection, d: Inspection) -> Finding:
    if p.mode == d.mode:
        return ok("mode", where, f"{p.mode} on both sides")
    said = f"mode mismatch: prefill has {p.mode}, decode has {d.mode}"
    return fail("mode", where, said, 'give both the same "mode" in kv_connector_extra_config')


def _versions(where: str, p: Inspection, d: Inspection) -> Finding:
    names = sorted(p.versions.keys() | d.versions.keys())
    differ = [
        f"{name} {p.versions.get(name, '(absent)')} / {d.versions.get(name, '(absent)')}"
        for name in names
        if p.versions.get(name) != d.versions.get(name)
    ]
    if not differ:
        return ok("versions", where, ", ".join(f"{name} {p.versions[name]}" for name in names))
    said = f"prefill / decode: {', '.join(differ)}"
    return warn("versions", where, said, "install the same versions on both sides; other pairs are not tested")


def _layouts(where: str, prefill: Ranks, decode: Ranks) -> list[Finding]:
    """Each aspect of the layouts on its own, so that all that differs is named and not only the first."""
    mine, theirs = prefill[0].layout, decode[0].layout
    others = sorted((mine.fingerprint.keys() | theirs.fingerprint.keys()) - {"model", *_DTYPES})
    findings = [
        _fits("model", where, *_only(mine, theirs, ("model",)), mine.fingerprint.get("model", "(not told)")),
        _fits("dtype", where, *_only(mine, theirs, _DTYPES), _named(mine, _DTYPES)),
    ]
    if others:
        findings.append(_fits("kernels", where, *_only(mine, theirs, tuple(others)), _named(mine, others)))
    sized = replace(mine, block_size=theirs.block_size, divisible=theirs.divisible)
    sizes = f"prefill {mine.block_size}, decode {theirs.block_size} tokens"
    findings.append(_fits("block size", where, mine, sized, sizes))
    told = f"{len(mine.planes)} planes, {mine.total_heads} KV heads in all, on {mine.device} / {theirs.device}"
    findings.append(_shapes(where, prefill, decode, told))
    return findings


def _only(mine: Layout, theirs: Layout, names: tuple[str, ...]) -> tuple[Layout, Layout]:
    """Two layouts that differ in nothing but these parts of the fingerprint."""
    a, b = ({name: one.fingerprint[name] for name in names if name in one.fingerprint} for one in (mine, theirs))
    return replace(mine, fingerprint=a), replace(mine, fingerprint=b)


def _named(layout: Layout, names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"{name} {layout.fingerprint.get(name, '(not told)')}" for name in names)


def _fits(check: str, where: str, mine: Layout, theirs: Layout, said: str) -> Finding:
    try:
        check_compatible(mine, theirs)
    except CompatError as error:
        what = error.message.replace("mine is", "prefill has").replace("theirs is", "decode has")
        return fail(check, where, what, error.hint)
    return ok(check, where, said)


def _shapes(where: str, prefill: Ranks, decode: Ranks, said: str) -> Finding:
    """What is left of the layouts, over every pair of ranks."""
    for p_rank, p in sorted(prefill.items()):
        for d_rank, d in sorted(decode.items()):
            mine, theirs = (
                replace(p.layout, fingerprint={}),
                replace(d.layout, fingerprint={}, block_size=p.layout.block_size, divisible=p.layout.divisible),
            )
            found = _fits("KV layout", f"{where}, ranks {p_rank} -> {d_rank}", mine, theirs, said)
            if found.status != "ok":
                return found
    return ok("KV layout", where, said)


def _plan(where: str, prefill: Ranks, decode: Ranks) -> Finding:
    p, d = prefill[0], decode[0]
    try:
        plan = shares(prefill, decode)
        legs = [legs_for(rank, p.tp_size, d.tp_size, p.layout.total_heads) for rank in prefill]
    except CompatError as error:
        return fail("TP plan", where, error.message, error.hint)
    for side in (prefill, decode):
        for rank, about in sorted(side.items()):
            expected = max(1, about.layout.total_heads // about.tp_size)
            if about.layout.heads != expected:
                said = f"wrong TP size: {about.engine_id} rank {rank} holds {about.layout.heads} KV heads, at TP "
                said += f"{about.tp_size} it would be {expected}"
                return fail("TP plan", where, said, "start the engine with the --tensor-parallel-size that it reports")
    said = f"TP {p.tp_size} -> {d.tp_size}: {len(plan)} pairs of ranks carry KV, {sum(legs)} speak"
    return ok("TP plan", where, said)
