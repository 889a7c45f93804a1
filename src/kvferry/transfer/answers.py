"""What a rank tells whoever asks on its side channel: routers, launchers, the doctor. Reads only; the core's thread."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry import __version__
from kvferry.config import ConnectorConfig
from kvferry.ids import LifeId, TransferId
from kvferry.protocol import messages as wire
from kvferry.protocol.landing import Landings
from kvferry.protocol.rendezvous import Rendezvous
from kvferry.transfer.inspect import inspection
from kvferry.transfer.load import Load
from kvferry.transfer.peers import Identity

Question = wire.Describe | wire.Inspect | wire.Why


class Answers:
    """`endings`: transfer id -> (ok, code, reason), kept by the core."""

    def __init__(
        self,
        identity: Identity,
        life: LifeId,
        config: ConnectorConfig,
        layout: wire.Layout,
        rendezvous: Rendezvous,
        landings: Landings,
        endings: Mapping[TransferId, tuple[bool, str, str]],
        load: Load,
    ) -> None:
        self._identity, self._life, self._config, self._layout = identity, life, config, layout
        self._rendezvous, self._landings, self._endings, self._load = rendezvous, landings, endings, load

    def to(self, question: Question) -> wire.Message:
        if isinstance(question, wire.Inspect):
            return inspection(self._identity, self._config, self._layout, self._life)
        if isinstance(question, wire.Describe):
            now = self._load.levels()
            return wire.Description(
                engine_id=self._identity.engine_id,
                life=self._life,
                rank=self._identity.rank,
                tp_size=self._identity.tp_size,
                role=self._identity.role,
                mode=self._config.mode,
                block_size=self._layout.block_size,
                version=__version__,
                open_transfers=now.sources + now.landings,
                backlog_bytes=now.backlog_bytes,
                pull_by=self._config.pull_by_now,
            )
        return self._verdict(question.transfer_id)

    def _verdict(self, transfer_id: TransferId) -> wire.Verdict:
        ending = self._endings.get(transfer_id)
        if self._rendezvous.is_open(transfer_id) or self._landings.is_open(transfer_id):
            state, code, reason = "open", "", ""
        elif ending is None:
            failing = self._landings.failing(transfer_id)
            state, code, reason = ("unknown", "", "") if failing is None else ("failed", *failing)
        else:
            state, code, reason = "ok" if ending[0] else "failed", ending[1], ending[2]
        return wire.Verdict(transfer_id=transfer_id, state=state, code=code, reason=reason)
