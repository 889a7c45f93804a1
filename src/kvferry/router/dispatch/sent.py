"""What one exchange has asked of its engines: sent, answered, and closed with it.

Owner: the event loop. A leg that is `dropped`, or whose response is closed before its end, is aborted in its engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvferry.errors import PeerUnreachable
from kvferry.router.dispatch.placement import Placement
from kvferry.router.engines.pool import Engine, Role
from kvferry.router.http import wire
from kvferry.router.http.at_once import Now
from kvferry.router.http.connection import Response
from kvferry.router.http.upstream import Asked, engine_error
from kvferry.router.replies import LegFailed, recounted
from kvferry.router.requests.openai import Body, Plan
from kvferry.router.services import Services

STREAMED = "text/event-stream"


class Sent(msgspec.Struct, frozen=True):
    """One leg, on its way. `fields`: of its body; `asked`: of the client's."""

    engine: Engine
    request: Asked
    fields: int
    asked: int


class Legs:
    """`headers`: of all requests."""

    def __init__(self, services: Services, headers: Mapping[str, str]) -> None:
        self._services = services
        self.headers = headers
        self._open: list[tuple[Role, Asked]] = []
        self._responses: list[tuple[Role, Response]] = []

    def send(self, plan: Plan, placed: Placement, body: Body) -> Sent:
        engine = placed.engine
        raw, headers = wire.dumps(body, plan.plain), placed.headers(self.headers)
        request = self._services.upstream.ask(engine.role, engine.url, plan.route, raw, headers)
        self._open.append((engine.role, request))
        return Sent(engine, request, len(body), plan.fields)

    async def answer(self, sent: Sent) -> Response:
        """A 200, its body unread; in the moment in which its head comes, with what came with it. Raises `LegFailed`."""
        engine, request = sent.engine, sent.request
        news = self.listen(sent)
        try:
            if news is not None:
                await news
            response = await request.answer()
            self._open.remove((engine.role, request))
        except LegFailed as error:
            if error.code == PeerUnreachable.code:
                self._services.pool.suspect(engine, error.message)
            else:
                self._services.pool.refresh(engine)
            raise
        self._responses.append((engine.role, response))
        if response.status != 200:
            refused = await engine_error(engine.role, engine.url, response)
            refused.body = recounted(refused.body, sent.fields, sent.asked)
            raise refused
        return response

    def listen(self, sent: Sent) -> Now | None:
        """Told in the moment in which the head of its answer comes, or none will; None where it isn't sent yet."""
        news = Now()
        return news if sent.request.listen(news.tell) else None

    def here(self, sent: Sent) -> Response | None:
        """The answer whose head has come, if it is a good stream. It is `taken`, or `answer` is asked for it."""
        response = sent.request.here
        return response if response and response.status == 200 and response.content_type == STREAMED else None

    def taken(self, sent: Sent, response: Response) -> bytes:
        """What has come of the answer that is `here`."""
        sent.request.take()
        self._open.remove((sent.engine.role, sent.request))
        self._responses.append((sent.engine.role, response))
        return response.take()

    async def ask(self, engine: Engine, route: str, raw: bytes) -> Response:
        """Something beside the legs. The answer once its head is there. Raises `LegFailed`."""
        response = await self._services.upstream.post(engine.role, engine.url, route, raw, self.headers)
        self._responses.append((engine.role, response))
        return response

    def close(self, role: Role | None = None) -> None:
        """All, or what was asked of one side."""
        for side, request in self._open:
            if role in (None, side):
                request.drop()
        for side, response in self._responses:
            if role in (None, side):
                response.close()
