"""The client's column of the failure matrix: the real router, before engines that end as they did in a scene.

`told` plays it and puts what the client got into the page's words:

    its answer                          the whole right one; streamed, to its `[DONE]`
    its answer, ended by D with `abort` as D says it, a 200
    STATUS `CODE` [(LEG)]               one error with the transfer's id; LEG: whose, and how it ended. Without: D's
                                        transfer failed, and the error has the reason that D's side channel gives
    ...; if it streams, one error event and the end
    ..., or ... if WHEN                 both are played
    is gone                             both legs are closed, and P is told to let go
    its connection breaks               and both legs close: the router's process is killed, see `failure_killed.py`
"""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import dataclass, replace
from typing import Literal

import failure_killed
from aiohttp import web
from failure_cells import Cell
from failure_killed import Got, got_of
from failure_scene import Scene
from scripted import (
    COMPLETIONS,
    DONE,
    MODEL,
    Call,
    Script,
    after,
    begin_stream,
    decode_ok,
    error_of,
    event,
    hang,
    prefill_ok,
    prefilled,
    refuse,
    serving,
    slam,
    stream,
)

ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
_LEGS = {
    ("prefill", "closed the connection"): "P's leg broke",
    ("prefill", "aborted the request"): "P's leg says that it was aborted",
    ("decode", "closed the connection"): "D's leg broke",
    ("decode", "cannot be reached"): "D's leg is refused",
}
"""Whose error, and how the router puts it: as the page does."""


@dataclass(frozen=True)
class Legs:
    """How the router's two legs go. `mode`: the router's. `verdict`: state, code and reason of D's side channel.
    `begun`: D's first token is out before it ends.

    `p`: 'answers', 'hangs' for longer than D, 'breaks' or 'aborts'. `d`: 'answers', 'hangs', 'aborts'; its load
    'fails'; its connection 'breaks' or is 'refused'.
    """

    mode: str
    p: Literal["answers", "hangs", "breaks", "aborts"]
    d: Literal["answers", "hangs", "aborts", "fails", "refused", "breaks"]
    verdict: tuple[str, str, str] = ("unknown", "", "")
    begun: bool = False


def told(cell: Cell, mode: str, scene: Scene) -> str:
    """What the client of this cell gets."""
    ways = ways_of(cell, mode, scene)
    if cell.row == "router dies":
        [legs] = ways.values()
        return failure_killed.told(legs.mode, p_answers=legs.p == "answers", begun=legs.begun)
    if cell.row == "client leaves":
        [legs] = ways.values()
        asyncio.run(_leaves(legs))
        return "is gone"
    said = [_said(legs) + (f" if {when}" if when else "") for when, legs in ways.items()]
    return ", or ".join(said)


def ways_of(cell: Cell, mode: str, scene: Scene) -> dict[str, Legs]:
    """When -> how the legs go then; '': else."""
    legs = _legs_of(cell, mode, scene)
    if cell.p.code == "dead" and scene.p_handed and legs.d == "fails":
        return {"": replace(legs, p="answers"), "P had not answered": replace(legs, p="breaks")}
    if legs.d == "breaks" and not scene.d_landed and scene.d in scene.dead:  # nobody is in its place
        return {"": legs, "it came later": replace(legs, d="refused")}
    return {"": legs}


def _legs_of(cell: Cell, mode: str, scene: Scene) -> Legs:
    router, begun = mode.partition("-")[0], cell.stage == "decoding"
    if cell.p.code == "dead" and not scene.p_handed:
        p = "breaks"
    elif cell.row == "request aborted on P" and not scene.p_handed:
        p = "aborts"
    else:
        p = "answers" if scene.p_answers_first else "hangs"
    if cell.row == "request aborted on D":
        return Legs(router, "answers", "aborts", begun=begun)  # P hears of nothing, and answers
    if router == "pull" and p == "hangs":
        router = "push"  # the router asks D of a pull once P has answered; other routers may not
    if cell.d.code == "dead":
        return Legs(router, p, "breaks", begun=begun)
    if cell.d.code in ("ok", "had"):
        return Legs(router, p, "answers", begun=begun)
    if cell.d.code == "-":
        return Legs(router, p, "hangs")
    then, after_all = scene.verdict, scene.why()
    assert then is not None and (then.state, then.code) == ("failed", cell.d.outcome)
    assert after_all == then, "D says something else once all is over"
    return Legs(router, p, "fails", (then.state, then.code, then.reason))


# -- what it got


@functools.cache
def _said(legs: Legs) -> str:
    whole, streamed = (asyncio.run(_asked(legs, streams)) for streams in (False, True))
    if legs.d in ("answers", "aborts"):
        assert (whole.status, streamed.status) == (200, 200) and whole.whole and streamed.whole
        _is_answer(legs, whole.body, streamed.body)
        return "its answer" if legs.d == "answers" else "its answer, ended by D with `abort`"
    error = _error(whole.status, whole, whole.body, legs)
    if streamed.status != 200:
        assert _error(streamed.status, streamed, streamed.body, legs) == error
        return error
    first, last, *rest = streamed.body.split(b"\n\n")
    assert first + b"\n\n" == event("one") and rest == [b""], streamed.body
    assert _error(whole.status, streamed, last.removeprefix(b"data: "), legs) == error
    return f"{error}; if it streams, one error event and the end"


def _is_answer(legs: Legs, whole: bytes, streamed: bytes) -> None:
    if legs.d == "aborts":
        [choice] = json.loads(whole)["choices"]
        assert choice == _aborted("one" if legs.begun else "")
        assert streamed == (event("one") if legs.begun else b"") + _event(_aborted("")) + DONE
        return
    [choice] = json.loads(whole)["choices"]
    assert choice["text"] == '"hi"' and streamed == event('"hi"') + event("!") + DONE


def _error(status: int, got: Got, body: bytes, legs: Legs) -> str:
    facts = error_of(body)
    assert got.whole and got.transfer_id and facts["transfer_id"] == got.transfer_id
    leg = next((leg for (side, how), leg in _LEGS.items() if side == facts["side"] and how in facts["message"]), "")
    if not leg:
        assert facts["side"] == "decode" and legs.verdict[2] and legs.verdict[2] in facts["message"], facts
    return f"{status} `{facts['code']}`" + (f" ({leg})" if leg else "")


# -- the play


async def _asked(legs: Legs, streams: bool) -> Got:
    limits = {"hold_s": 0.01} if legs.p == "hangs" else {}  # it doesn't come, however long D's failure waits for it
    async with serving(mode=legs.mode, **limits) as pair:
        pair.p.script, pair.d.script, seen = _scripts(legs)
        pair.d.side.verdict = legs.verdict
        if legs.d == "refused":
            await pair.d.shut()
        return await got_of(pair.session.post(pair.url + COMPLETIONS, json=ASK | {"stream": streams}), seen)


async def _leaves(legs: Legs) -> None:
    async with serving(mode=legs.mode) as pair:
        pair.p.script = prefill_ok if legs.p == "answers" else hang
        pair.d.script = _first_token if legs.d == "answers" else hang
        reader, writer = await pair.raw(ASK | {"stream": True})
        calls = [await pair.p.call()]
        if legs.mode != "pull" or legs.p == "answers":
            calls.append(await pair.d.call())
        if legs.d == "answers":
            await reader.readuntil(b"one")
        writer.close()
        async with asyncio.timeout(5):
            for call in calls:
                await call.ended.wait()
        assert calls[-1].cancelled.is_set()
        [transfer_id] = {call.params["transfer_id"] for call in calls}
        if legs.d != "answers":
            assert (await pair.p.side.abandon_of(transfer_id))[1] == "the client left"
        else:
            assert not pair.p.side.abandoned


def _scripts(legs: Legs) -> tuple[Script, Script, asyncio.Event]:
    """P's, D's, and what is to be set once the client has D's first token."""
    answered, failed, seen = asyncio.Event(), asyncio.Event(), asyncio.Event()
    return _prefill(legs, answered, failed), _decode(legs, answered, failed, seen), seen


def _prefill(legs: Legs, answered: asyncio.Event, failed: asyncio.Event) -> Script:
    async def answers(call: Call) -> web.StreamResponse:
        answered.set()
        return prefilled(call)

    async def aborts(call: Call) -> web.StreamResponse:
        return web.json_response({"id": "p", "choices": [_aborted("")]})

    late = {"breaks": slam, "aborts": aborts}.get(legs.p)
    if late is not None:
        # it comes after D's failure, which is one of its consequences, and goes before it
        return after(failed, late) if legs.d == "fails" and legs.mode != "pull" else late
    return answers if legs.p == "answers" else hang


def _decode(legs: Legs, answered: asyncio.Event, failed: asyncio.Event, seen: asyncio.Event) -> Script:
    async def fails(call: Call) -> web.StreamResponse:
        failed.set()
        error = {"error": {"message": "KV load failed", "type": "InternalServerError", "param": None, "code": 500}}
        if call.body.get("stream"):
            return await stream(call, [f"data: {json.dumps(error)}\n\n".encode(), DONE])
        return await refuse(500, error)(call)

    async def aborts(call: Call) -> web.StreamResponse:
        if not call.body.get("stream"):
            return web.json_response({"id": "d", "choices": [_aborted("one" if legs.begun else "")]})
        response = await begin_stream(call)
        if legs.begun:
            await response.write(event("one"))
            await seen.wait()
        await response.write(_event(_aborted("")) + DONE)
        return response

    async def breaks(call: Call) -> web.StreamResponse:
        if not (legs.begun and call.body.get("stream")):
            return await slam(call)
        response = await begin_stream(call)
        await response.write(event("one"))
        await seen.wait()
        assert call.request.transport is not None
        call.request.transport.abort()
        return response

    script = {"answers": decode_ok, "aborts": aborts, "fails": fails, "breaks": breaks}.get(legs.d, hang)
    return after(answered, script) if legs.p == "answers" else script


def _aborted(text: str) -> dict[str, object]:
    """The choice of an engine whose request was aborted, as vLLM says it."""
    return {"index": 0, "text": text, "finish_reason": "abort"}


def _event(choice: dict[str, object]) -> bytes:
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


async def _first_token(call: Call) -> web.StreamResponse:
    response = await begin_stream(call)
    await response.write(event("one"))
    return await hang(call)
