"""The examination: ask every engine, judge every pair, have every pair of ranks probed, predict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from kvferry.auth import AuthKey
from kvferry.doctor import fit, path, predict
from kvferry.doctor.findings import Finding, exit_code, ok, warn
from kvferry.doctor.path import Way
from kvferry.doctor.predict import Advice, Prediction
from kvferry.doctor.reach import LIMIT_S, Engine, ask
from kvferry.doctor.target import Target
from kvferry.errors import CompatError, PeerUnreachable
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Probe, Probed
from kvferry.transfer import inquiry

SIZES = tuple(4096 << (2 * step) for step in range(8))
"""4 KiB to 64 MiB."""
PROBE_S = 55.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. `ttft_ms` None: no objective; `expected` '': no transport in particular. `key`: of the
    side channels."""

    prefills: tuple[Target, ...]
    decodes: tuple[Target, ...]
    prompt_tokens: int
    ttft_ms: float | None
    expected: str
    api_key: str
    key: AuthKey | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill and one decode engine. `broken`: something of the two or between them FAILs."""

    prefill: str
    decode: str
    broken: bool
    ways: tuple[Way, ...]
    predictions: tuple[Prediction, ...]
    advice: Advice


class Report(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[Finding, ...]
    pairs: tuple[Pair, ...]
    engines: tuple[Engine, ...]

    @property
    def code(self) -> int:
        return exit_code(self.findings)


async def examine(order: Order, tell: Callable[[Finding], None]) -> Report:
    """`tell` hears each finding as it is made."""
    findings: list[Finding] = []

    def note(*found: Finding) -> None:
        for one in found:
            findings.append(one)
            tell(one)

    targets = (*order.prefills, *order.decodes)
    asked = await asyncio.gather(*(ask(target, order.api_key, order.key) for target in targets))
    for engine, found in asked:
        if engine.complete:
            found += fit.judge_one(engine.target, engine.ranks)
            found.append(fit.judge_clock(f"{engine.target.role} {engine.name}", engine.ahead_s, engine.give_or_take_s))
        note(*found)
    cut = len(order.prefills)
    pairs = []
    for (prefill, of_prefill), (decode, of_decode) in product(asked[:cut], asked[cut:]):
        if prefill.complete and decode.complete:
            before = len(findings)
            pair = await _pair(order, prefill, decode, note)
            broken = exit_code((*of_prefill, *of_decode, *findings[before:])) == 2
            pairs.append(msgspec.structs.replace(pair, broken=broken))
    return Report(findings=tuple(findings), pairs=tuple(pairs), engines=tuple(engine for engine, _ in asked))


async def _pair(order: Order, prefill: Engine, decode: Engine, note: Callable[..., None]) -> Pair:
    """`broken` is yet to be told."""
    where = f"{prefill.name} -> {decode.name}"
    fits = fit.judge_models(where, prefill.models, decode.models)
    fits += fit.judge_pair(prefill.ranks, decode.ranks)
    note(*fits)
    ways = []
    for way in _ways(prefill, decode):
        probed = msgspec.structs.replace(way, probed=await _probe(prefill, decode, way, order.key))
        ways.append(probed)
        note(*path.judge(probed, order.expected))
    predictions: list[Prediction] = []
    if exit_code(fits) < 2 and not any(way.probed.failure for way in ways):
        predictions = predict.predict(ways, order.prompt_tokens)
        note(*(_foretold(where, one) for one in predictions))
    advice = predict.advise(ways, predictions, order.ttft_ms)
    if advice.disappoints:
        todo = "a faster network between the two, a smaller KV dtype, shorter prompts, or a looser objective"
        note(warn("time to first token", where, advice.reason, todo))
    elif predictions and order.ttft_ms is not None:
        note(ok("time to first token", where, advice.reason))
    return Pair(
        prefill=prefill.name,
        decode=decode.name,
        broken=False,
        ways=tuple(ways),
        predictions=tuple(predictions),
        advice=advice,
    )


def _foretold(where: str, one: Prediction) -> Finding:
    said = f"{one.prompt_tokens} tokens are {path.bytes_text(one.total_bytes)}: {predict.span(one)}"
    return ok(f"predicted {one.op}", where, said)


def _ways(prefill: Engine, decode: Engine) -> Sequence[Way]:
    """Pairs of ranks that carry KV; where no plan can be made, the two first ones, for their path's sake."""
    plan: list[tuple[int, int, HeadShare | None]]
    try:
        plan = [(rank, share.p_rank, share) for rank, share in fit.shares(prefill.ranks, decode.ranks)]
    except CompatError:
        plan = [(0, 0, None)]
    return [
        Way(
            prefill=prefill.name,
            decode=decode.name,
            p_rank=p_rank,
            d_rank=d_rank,
            share=share,
            src=prefill.ranks[p_rank].layout,
            dst=decode.ranks[d_rank].layout,
            probed=Probed(failure="not made"),
        )
        for d_rank, p_rank, share in plan
    ]


async def _probe(prefill: Engine, decode: Engine, way: Way, key: AuthKey | None) -> Probed:
    """Through D's rank, to P's rank at the address under which the router will name it."""
    p, d = prefill.target, decode.target
    question = Probe(
        host=p.host, port=p.port + way.p_rank, sizes=SIZES, piece=predict.PIECE_BYTES, limit_s=PROBE_S - LIMIT_S
    )
    try:
        return await inquiry.probe(d.host, d.port + way.d_rank, question, PROBE_S, key)
    except PeerUnreachable as error:
        return Probed(failure=str(error))
