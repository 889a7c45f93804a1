"""What a render session asks of the engines, as the router's own plan of a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.router.requests import openai
from kvferry.router.requests.openai import GENERATE, Body, Plan


def plan_of(client: Plan, requests: Sequence[Body]) -> Plan:
    """`client`: the plan of the client's own body. Each of `requests` is a part, cleared of what names a peer.

    Where the client wants no stream, and no stop string has to be looked for, decode is asked for its answer whole:
    then a decode engine that dies in the middle is another try, and it costs the least.
    """
    plans = [openai.read(GENERATE, request) for request in requests]
    streams = client.stream or bool(client.parts[0].get("stop"))
    parts = tuple(part for plan in plans for part in plan.parts)
    return msgspec.structs.replace(
        plans[0],
        model=plans[0].model or client.model,
        stream=streams,
        usage=True,
        alone=client.alone,
        rendered=True,
        parts=tuple(part if streams else whole(part) for part in parts),
    )


def whole(part: Body) -> Body:
    return {key: value for key, value in part.items() if key != "stream_options"} | {"stream": False}
