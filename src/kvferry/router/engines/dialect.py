"""How the two legs are told of their transfer: one class per connector. Pure.

`kvferry` pairs by transfer id and needs P's coordinates up front. `upstream-pull` (vLLM's NixlConnector) hands D what
P returned. `upstream-push` (vLLM's NixlPushConnector) pairs by the text of the request id, so both legs get one fresh
`X-Request-Id`; its scheduler dies of a missing key, so every key that it reads is there.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from kvferry.errors import ConfigError
from kvferry.ids import TransferId
from kvferry.protocol.messages import Description
from kvferry.router.config import RouterConfig
from kvferry.router.replies import Refusal
from kvferry.router.requests.openai import CHAT, GENERATE, RESPONSES, Plan
from kvferry.router.spec import EngineSpec

Params = dict[str, Any]

UPSTREAM_PREFILL: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Source(msgspec.Struct, frozen=True):
    """The prefill engine of one transfer, as far as it is known. `dp_rank`: the data-parallel rank that its leg is
    pinned to, which the other two are of; None where it has but one."""

    spec: EngineSpec
    description: Description | None
    dp_rank: int | None = None

    def pinned(self, params: Params) -> Params:
        return params if self.dp_rank is None else params | {"remote_dp_rank": self.dp_rank}


class Dialect(Protocol):
    name: str
    concurrent: bool
    """Both legs start at once."""
    side_channel: bool
    """The engines answer kvferry's side channel: they are described at readiness, and told of abandoned transfers."""

    def refuse(self, plan: Plan) -> None:
        """Raises `Refusal` for what this connector cannot do right."""

    def prefill(self, transfer_id: TransferId, plan: Plan) -> Params: ...

    def decode(self, transfer_id: TransferId, plan: Plan, source: Source, returned: Params | None) -> Params: ...

    def lacks(self, transfer_id: TransferId, returned: Params | None) -> str:
        """What P's reply misses, "" if it is right."""

    def headers(self, transfer_id: TransferId) -> dict[str, str]:
        """Headers of both legs that the connector depends on."""


class KVFerry:
    side_channel = True

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = mode
        self.concurrent = mode in ("push", "stream")

    def refuse(self, plan: Plan) -> None:
        pass

    def prefill(self, transfer_id: TransferId, plan: Plan) -> Params:
        return {"transfer_id": transfer_id, "do_remote_decode": True, "mode": self.mode, "fan_out": plan.n}

    def decode(self, transfer_id: TransferId, plan: Plan, source: Source, returned: Params | None) -> Params:
        about = source.description
        if about is None:
            raise ConfigError(f"prefill engine {source.spec.url} was never described")
        params: Params = {
            "transfer_id": transfer_id,
            "do_remote_prefill": True,
            "mode": self.mode,
            "remote_host": source.spec.side_host,
            "remote_port": source.spec.side_port,
            "remote_engine_id": about.engine_id,
            "remote_tp_size": about.tp_size,
        }
        return source.pinned(params)

    def lacks(self, transfer_id: TransferId, returned: Params | None) -> str:
        if not returned or returned.get("transfer_id") != transfer_id:
            return "this transfer's kv_transfer_params in its reply (does it run KVFerryConnector as a producer?)"
        return ""

    def headers(self, transfer_id: TransferId) -> dict[str, str]:
        return {}


class Upstream:
    """What the two upstream dialects share."""

    side_channel = False

    def refuse(self, plan: Plan) -> None:
        if plan.n > 1:
            raise Refusal(
                501,
                "not_supported",
                "`n` above 1 cannot be served through vLLM's own NIXL connectors",
                param="n",
                hint="use KVFerryConnector, or one request per choice",
            )

    def prefill(self, transfer_id: TransferId, plan: Plan) -> Params:
        return dict(UPSTREAM_PREFILL)

    def lacks(self, transfer_id: TransferId, returned: Params | None) -> str:
        if not returned or not returned.get("remote_engine_id"):
            return "kv_transfer_params in its reply (is it started with vLLM's NIXL connector?)"
        return ""


class UpstreamPull(Upstream):
    name = "upstream-pull"
    concurrent = False

    def decode(self, transfer_id: TransferId, plan: Plan, source: Source, returned: Params | None) -> Params:
        return source.pinned(dict(returned or {}))

    def headers(self, transfer_id: TransferId) -> dict[str, str]:
        return {}


_EXTERNAL = {CHAT: "chatcmpl-{}", GENERATE: "generate-tokens-{}"}
"""How vLLM names a request of each route, from its X-Request-Id."""


class UpstreamPush(Upstream):
    name = "upstream-push"
    concurrent = True

    def refuse(self, plan: Plan) -> None:
        super().refuse(plan)
        if plan.route == RESPONSES:
            raise Refusal(
                501,
                "not_supported",
                f"the route {RESPONSES} cannot be served through vLLM's NixlPushConnector: its requests carry no id of "
                "ours to pair by",
                hint="use KVFerryConnector, or NixlConnector",
            )

    def decode(self, transfer_id: TransferId, plan: Plan, source: Source, returned: Params | None) -> Params:
        spec = source.spec
        # P's exact request id ends in a random suffix and cannot be known yet; upstream strips the suffix to match.
        external = _EXTERNAL.get(plan.route, "cmpl-{}-0").format(transfer_id)
        params: Params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": spec.engine_id,
            "remote_request_id": external,
            "remote_block_ids": [],
            "remote_host": spec.side_host,
            "remote_port": spec.side_port,
            "tp_size": spec.tp or 1,
            "dcp_size": 1,
            "pp_size": 1,
        }
        return source.pinned(params)

    def headers(self, transfer_id: TransferId) -> dict[str, str]:
        return {"X-Request-Id": transfer_id}


def dialect_of(config: RouterConfig) -> Dialect | None:
    """None: colocated, no transfer at all."""
    if config.colocated:
        return None
    if config.connector == "upstream-pull":
        return UpstreamPull()
    if config.connector == "upstream-push":
        return UpstreamPush()
    return KVFerry(config.mode)
