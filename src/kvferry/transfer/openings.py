"""D: requests whose prefill engine isn't connected yet. Each becomes a destination as soon as P's rank 0 has greeted,
or fails. Owned by the core's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.config import ConnectorConfig
from kvferry.errors import PeerUnreachable
from kvferry.protocol import messages as wire
from kvferry.protocol.landing import Destination
from kvferry.protocol.layout import fan_in, legs_for
from kvferry.transfer.commands import Land
from kvferry.transfer.peers import Identity, Peer, Peers, Stage

Open = Callable[[Destination], None]
Fail = Callable[[Land, str, str], None]


@dataclass
class _Opening:
    land: Land
    due: float


class Openings:
    """`opened`, `failed`: what becomes of each, once. `clock`: monotonic seconds."""

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        layout: wire.Layout,
        peers: Peers,
        clock: Callable[[], float],
        *,
        opened: Open,
        failed: Fail,
    ) -> None:
        self._identity, self._config, self._layout = identity, config, layout
        self._peers, self._clock = peers, clock
        self._opened, self._failed = opened, failed
        self._open: dict[str, _Opening] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, land: Land) -> None:
        opening = self._open[land.request] = _Opening(land, self._clock() + self._config.connect_timeout_s)
        self._advance(opening)

    def cancel(self, request: str, reason: str) -> None:
        opening = self._open.get(request)
        if opening is not None:
            self._fail(opening, "cancelled", reason)

    def advance(self) -> None:
        """Some peer's stage has changed."""
        for opening in list(self._open.values()):
            self._advance(opening)

    def want(self, peer: Peer) -> bool:
        return any((one.land.host, one.land.port) == peer.address for one in self._open.values())

    def due(self) -> list[float]:
        return [opening.due for opening in self._open.values()]

    def tick(self, now: float) -> None:
        for opening in [one for one in self._open.values() if one.due <= now]:
            land = opening.land
            peer = self._peers.by_address(land.host, land.port)
            greeted = peer is not None and peer.stage is Stage.GREETING
            heard = "accepts but does not answer" if greeted else "cannot be reached"
            limit = f"within {self._config.connect_timeout_s:g} s"
            self._fail(opening, "peer_unreachable", f"side channel {land.host}:{land.port} {heard} {limit}")

    def _advance(self, opening: _Opening) -> None:
        """Open the landing as soon as P's rank 0 is up, or fail it if that can't be."""
        try:
            self._try_to_open(opening)
        except PeerUnreachable as error:  # some rank's address can be none, whenever we come to dial it
            self._fail(opening, error.code, str(error))

    def _try_to_open(self, opening: _Opening) -> None:
        land = opening.land
        first = self._peers.dial(land.host, land.port)
        if first.stage is Stage.REFUSED:
            return self._fail(opening, *first.refusal)
        if first.stage is Stage.SILENT:
            return self._fail(opening, "peer_gone", f"{first.name}: silent for {self._config.lease_s:g} s")
        if first.stage is not Stage.UP or not isinstance(first.greeting, wire.Welcome):
            return None
        found = first.greeting
        if land.engine_id and land.engine_id != found.engine_id:
            reason = (
                f"remote_engine_id: the request says {land.engine_id!r}, {land.host}:{land.port} is {found.engine_id!r}"
            )
            return self._fail(opening, "wrong_engine", reason)
        if land.tp_size and land.tp_size != found.tp_size:
            reason = f"remote_tp_size: the request says {land.tp_size}, {first.name} has {found.tp_size}"
            return self._fail(opening, "wrong_tp_size", reason)
        me, heads = self._identity, self._layout.total_heads
        peers = []
        for share in fan_in(me.rank, me.tp_size, found.tp_size, heads):
            peer = self._peers.dial(land.host, land.port + share.p_rank)
            peers.append((peer.key, legs_for(share.p_rank, found.tp_size, me.tp_size, heads)))
        del self._open[land.request]
        destination = Destination(
            request=land.request,
            transfer_id=land.transfer_id,
            mode=land.mode,
            start_token=land.start_token,
            end_token=land.end_token,
            block_ids=land.block_ids,
            peers=tuple(dict(peers).items()),
            prompt=land.prompt,
            verify=self._config.verify_kv,
        )
        return self._opened(destination)

    def _fail(self, opening: _Opening, code: str, reason: str) -> None:
        del self._open[opening.land.request]
        self._failed(opening.land, code, reason)
