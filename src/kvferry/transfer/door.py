"""What comes in on the side channel, before it is used: is it a message, and may this peer say it now?

A handshake has shown that the other side has the key (`transfer/curve.py`); it may still be mistaken, of another
version, or somebody's who shouldn't have the key. What is turned away here is counted by reason, told in the log at
most once per `_QUIET_S` and reason, and changes nothing. Owned by the transfer core's thread.

| Reason | |
|---|---|
| `wrong_key` | a handshake with another key, or with none |
| `no_handshake` | a connection that ended, or went silent, in the handshake; port checks do that too |
| `malformed` | bytes that are no message of this version |
| `oversized` | more than `codec.MAX_BYTES` |
| `not_greeted` | a registration, or what belongs to one, from a rank that has not greeted (any more) |
| `wrong_side` | what only the other side of this connection may say |
| `foreign` | about a registration that was made with somebody else |
| `replayed` | a registration or a welcome that is here already |
| `not_reading` | a peer that is owed more messages than one may be: it is taken for dead |
| `bad_greeting` | a layout that no rank can have, an agent that is another's |
| `unusable` | numbers that pass all this, and make no sense further in |
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.protocol.landing import Landings
from kvferry.protocol.rendezvous import Rendezvous
from kvferry.transfer.peers import Peer, Stage
from kvferry.transfer.stats import Recorder

log = logging.getLogger("kvferry.transfer")

_QUIET_S = 10.0
_UNINVITED = {
    "wrong_key": "a connection with another key, or with none",
    "not_reading": "a peer that does not read what it is told",
    "no_handshake": "a connection that ended in the handshake, for want of a key or to see whether the port is open",
}
_OF_DECODE = wire.Register | wire.Waiting | wire.Cancel | wire.Fetched
_OF_PREFILL = wire.Begin | wire.Seal | wire.Grant | wire.Landed | wire.Failed
_STAGING_OF_PREFILL = wire.StageAsk | wire.Staged
_OF_ASKERS = wire.Describe | wire.Inspect | wire.Why | wire.Abandon | wire.Watch | wire.Probe | wire.ProbeStep


class Door:
    """`name`: of this rank, for the log."""

    def __init__(
        self, name: str, landings: Landings, rendezvous: Rendezvous, stats: Recorder, clock: Callable[[], float]
    ) -> None:
        self._name, self._landings, self._rendezvous = name, landings, rendezvous
        self._stats, self._clock = stats, clock
        self._told: dict[str, tuple[float, int]] = {}  # reason -> when it was logged last, how many since

    def read(self, data: bytes) -> wire.AnyMessage:
        """Raises `codec.WireError`, counted."""
        try:
            return codec.decode(data)
        except codec.WireError as error:
            reason = "oversized" if isinstance(error, codec.OversizedError) else "malformed"
            self.turned_away(reason, str(error))
            raise

    def admits(self, peer: Peer | None, message: wire.AnyMessage) -> bool:
        """Whether that peer (None: it has not greeted) may say this now. Otherwise it is counted."""
        reason = self._objection(peer, message)
        if reason:
            who = peer.name if peer is not None else "a stranger"
            self.turned_away(reason, f"{type(message).__name__} from {who}")
        return not reason

    def uninvited(self, reason: str) -> None:
        """The channel has turned somebody away, in the handshake or for a message of several frames."""
        self.turned_away(reason, _UNINVITED.get(reason, "a message of several frames, or noise"))

    def turned_away(self, reason: str, what: str) -> None:
        self._stats.turned_away(reason)
        now = self._clock()
        last, kept = self._told.get(reason, (-_QUIET_S, 0))
        if now - last < _QUIET_S:
            self._told[reason] = (last, kept + 1)
            return
        more = f" (and {kept} more since the last of these lines)" if kept else ""
        level = logging.INFO if reason == "no_handshake" else logging.WARNING
        log.log(level, "%s: turned away on the side channel: %s: %s%s", self._name, reason, what, more)
        self._told[reason] = (now, 0)

    def _objection(self, peer: Peer | None, message: wire.AnyMessage) -> str:
        dialled = peer is not None and peer.address is not None
        if isinstance(message, wire.Hello | _OF_ASKERS):
            return "wrong_side" if dialled else ""
        if peer is None:
            return "" if isinstance(message, wire.Refuse) else "not_greeted"
        if isinstance(message, wire.Welcome):
            if not dialled:
                return "wrong_side"
            return "" if peer.stage in (Stage.GREETING, Stage.WARMING) else "replayed"
        if isinstance(message, wire.Beat | wire.Refuse):
            return ""
        if isinstance(message, wire.Look | wire.Looked):
            if peer.stage not in (Stage.UP, Stage.SILENT):
                return "not_greeted"
            return "" if dialled == isinstance(message, wire.Look) else "wrong_side"
        if isinstance(message, wire.Warm | wire.StageStep | _OF_DECODE | _OF_PREFILL) and peer.greeting is None:
            return "not_greeted"
        if isinstance(message, wire.StageStep):
            return "" if dialled == isinstance(message, _STAGING_OF_PREFILL) else "wrong_side"
        if isinstance(message, _OF_DECODE):
            if dialled or peer.stage not in (Stage.UP, Stage.SILENT):
                return "wrong_side" if dialled else "not_greeted"
            seen = isinstance(message, wire.Register) and self._rendezvous.met(peer.key, message)
            return "replayed" if seen else ""
        if isinstance(message, _OF_PREFILL):
            if not dialled:
                return "wrong_side"
            return "" if self._landings.is_with(peer.key, message.reg_id) else "foreign"
        return "" if isinstance(message, wire.Warm) else "wrong_side"
