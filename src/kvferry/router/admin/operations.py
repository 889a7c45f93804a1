"""The routes by which people and programs run the router: engines in, out and to rest, and the end of a transfer.

They guard nothing: whoever serves them decides who may ask. Errors have the shape of all others of the router.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.ids import TransferId
from kvferry.router.dispatch.cancel import cancel
from kvferry.router.engines.pool import Engine, Pool, Role
from kvferry.router.replies import Refusal, error_response
from kvferry.router.services import Services
from kvferry.router.spec import parse_spec
from kvferry.transfer.inquiry import endpoint

MOST_BODY = 64 * 1024
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies."""


class Which(Body, frozen=True):
    url: Text


class Drain(Body, frozen=True):
    """`timeout_s` null: the router's --drain-timeout. 0 doesn't wait."""

    url: Text
    timeout_s: Seconds | None = None


class Add(Body, frozen=True):
    """`engine`: as --prefill and --decode have it."""

    engine: Text
    role: Role


class SetRole(Body, frozen=True):
    url: Text
    role: Role
    timeout_s: Seconds | None = None


class Cancel(Body, frozen=True):
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    reason: Annotated[str, msgspec.Meta(max_length=1024)] = "cancelled by an operator"


Kind = TypeVar("Kind", bound=Body)


def add_routes(app: web.Application, services: Services) -> None:
    """`GET, POST, DELETE /admin/engines`, `POST /admin/drain|undrain|role|cancel`."""
    operations = Operations(services)
    app.router.add_get("/admin/engines", _typed(operations.engines))
    app.router.add_post("/admin/engines", _typed(operations.add))
    app.router.add_delete("/admin/engines", _typed(operations.remove))
    app.router.add_post("/admin/drain", _typed(operations.drain))
    app.router.add_post("/admin/undrain", _typed(operations.undrain))
    app.router.add_post("/admin/role", _typed(operations.role))
    app.router.add_post("/admin/cancel", _typed(operations.cancel))


class Operations:
    def __init__(self, services: Services) -> None:
        self._pool = services.pool
        self._members = services.members

    async def engines(self, request: web.Request) -> web.StreamResponse:
        facts = [engine_facts(self._pool, engine) for engine in self._pool.all()]
        return web.json_response({"engines": facts, "missing": self._pool.missing()})

    async def add(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, Add)
        return self._reply(self._members.add(parse_spec(body.engine), body.role, "the admin API"), status=201)

    async def remove(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, Drain)
        engine = self._members.get(body.url)
        drained = await self._shielded(self._members.remove(body.url, body.timeout_s))
        return self._reply(engine, drained=drained)

    async def drain(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, Drain)
        drained = await self._members.drain(body.url, body.timeout_s)
        return self._reply(self._members.get(body.url), drained=drained)

    async def undrain(self, request: web.Request) -> web.StreamResponse:
        return self._reply(self._members.undrain((await read_body(request, Which)).url))

    async def role(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, SetRole)
        return self._reply(await self._shielded(self._members.set_role(body.url, body.role, body.timeout_s)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, Cancel)
        told = await cancel(self._pool, TransferId(body.transfer_id), body.reason)
        held = sum(one.outcome == "released" for one in told)
        facts = {"transfer_id": body.transfer_id, "released": held, "told": msgspec.to_builtins(told)}
        return web.json_response(facts)

    async def _shielded(self, work: Any) -> Any:
        """It ends even if the one who asked is gone: half of a change is worse than either end of it."""
        return await asyncio.shield(asyncio.ensure_future(work))

    def _reply(self, engine: Engine, status: int = 200, **more: Any) -> web.Response:
        facts = {"engine": engine_facts(self._pool, engine), "missing": self._pool.missing()} | more
        return web.json_response(facts, status=status)


def engine_facts(pool: Pool, engine: Engine) -> dict[str, Any]:
    """What `GET /admin/engines` says of one."""
    about, spec = engine.description, engine.spec
    standing = engine.standing.sample()
    return {
        "url": engine.url,
        "role": engine.role,
        "source": engine.source,
        "ready": engine.ready,
        "takes": engine.takes,
        "reason": engine.why_not,
        "draining": engine.draining,
        "leaving": engine.leaving,
        "in_flight": engine.in_flight,
        "circuit": engine.standing.state.name.lower(),
        "ejected_for_s": round(pool.ejected_for(engine.role, engine.url), 1),
        "recent": {"good": int(standing.good), "bad": int(standing.bad)},
        "side_channel": endpoint(spec.side_host, spec.side_port).removeprefix("tcp://"),
        "engine_id": about.engine_id if about is not None else spec.engine_id,
        "tp": about.tp_size if about is not None else spec.tp,
        "models": sorted(engine.models or ()),
    }


async def read_body(request: web.Request, kind: type[Kind]) -> Kind:
    """Raises `Refusal` 400 in one line that names field, value, and what was expected; 413 for one that is too long."""
    raw = await request.content.read(MOST_BODY + 1)
    while len(raw) <= MOST_BODY and (more := await request.content.read(MOST_BODY + 1 - len(raw))):
        raw += more
    if len(raw) > MOST_BODY:
        raise Refusal(413, "body_too_large", f"the body is above {MOST_BODY} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(400, "invalid_body", f"{error}{_nearest(str(error), kind)}", hint=_shape(kind)) from None
    except msgspec.DecodeError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}", hint=_shape(kind)) from None


def _shape(kind: type[Body]) -> str:
    names = (field.name if field.required else f"{field.name}?" for field in msgspec.structs.fields(kind))
    return f"expected {{{', '.join(names)}}}"


def _nearest(complaint: str, kind: type[Body]) -> str:
    if "unknown field" not in complaint:
        return ""
    name = complaint.split("unknown field `", 1)[1].split("`")[0]
    near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _typed(handler: Handler) -> Handler:
    async def typed(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except KVFerryError as error:
            return error_response(error)

    return typed
