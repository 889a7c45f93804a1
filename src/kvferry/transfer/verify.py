"""Whether the KV that landed is the KV that was computed: who digests what, and when. The transfer core's owner thread.

P digests what it writes, or lets D read, once the copies are posted, while they are under way, from the blocks that its
engine computed and still keeps. The closing `Landed` carries the digests. D makes the same of its own blocks when
`Landed` comes, before its engine hears that the KV is there; where they differ, the transfer has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.config import ConnectorConfig
from kvferry.errors import KvMismatch
from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol import messages as wire
from kvferry.protocol.digest import Digest, Held, Scope, sampled, weaker
from kvferry.protocol.layout import HeadShare, heads_of
from kvferry.protocol.plan import total_bytes
from kvferry.protocol.stream import Span
from kvferry.story import Story
from kvferry.transfer.audit import block_digests
from kvferry.transfer.fabric import Op
from kvferry.transfer.peers import Identity, Peer
from kvferry.transfer.stats import Recorder
from kvferry.transfer.words import store_of

_MOST_FORESEEN = 256
ShareWith = Callable[[Op, Peer], HeadShare | None]
RegisterOf = Callable[[str, RegistrationId], wire.Register | None]


@dataclass
class _Account:
    """P: what was digested for one registration so far."""

    digest: Digest
    transfer_id: TransferId
    nbytes: int = 0
    spent_s: float = 0.0


class Verifier:
    """`share_with(op, peer)`: which heads go between that peer and us. Raises `ConfigError` for memory that can't be
    read in words."""

    def __init__(
        self,
        identity: Identity,
        layout: wire.Layout,
        config: ConnectorConfig,
        share_with: ShareWith,
        story: Story,
        clock: Callable[[], float],
        stats: Recorder,
    ) -> None:
        self._identity, self._layout = identity, layout
        self._depth, self._audits = config.verify_kv, config.audit
        self._share_with, self._story, self._clock, self._stats = share_with, story, clock, stats
        self._store = store_of(layout) if self._depth != "off" else None
        self._open: dict[tuple[str, RegistrationId], _Account] = {}
        self._foreseen: dict[tuple[str, RegistrationId], tuple[wire.Register, Digest]] = {}  # D, the last few

    def said(self, peer: Peer, message: wire.Message, register_of: RegisterOf) -> None:
        """This went to a peer. `register_of`: P's registrations that have not ended."""
        if isinstance(message, wire.Register):
            self.foresee("READ", peer, message)
        elif isinstance(message, wire.Grant):
            register = register_of(peer.key, message.reg_id)
            if register is not None:
                self.took(peer, register, message.block_ids)

    def foresee(self, op: Op, peer: Peer, register: wire.Register) -> None:
        """A registration was made, and its KV will come: what can be done before it does."""
        share = self._share_with(op, peer)
        if share is None or not share.count or not 0 <= register.start_token < register.end_token:
            return
        if self._store is None or weaker(self._depth, register.verify) != "sample":
            return
        scope = self._scope(op, peer, register, share)
        sampled(scope, register.transfer_id)
        if op == "READ":
            digest = Digest(scope, "sample", register.transfer_id)
            digest.foresee(self._landing_in(register, share))
            self._foreseen[peer.key, register.reg_id] = register, digest
            while len(self._foreseen) > _MOST_FORESEEN:
                del self._foreseen[next(iter(self._foreseen))]

    # -- the prefill side -------------------------------------------------------------------------------------------

    def took(self, peer: Peer, register: wire.Register, block_ids: tuple[int, ...], span: Span | None = None) -> None:
        """`span` (None: all) of a registration is on its way. `block_ids`: of ours, logical block 0 first."""
        depth, share = weaker(self._depth, register.verify), self._share_with("WRITE", peer)
        start, end = register.start_token, register.end_token
        if depth == "off" or self._store is None or share is None or not share.count:
            return
        if not 0 <= start < end <= len(block_ids) * self._layout.block_size and span is None:
            return  # D can't read that either
        began = self._clock()
        key = (peer.key, register.reg_id)
        account = self._open.get(key)
        if account is None:
            scope = self._scope("WRITE", peer, register, share)
            account = self._open[key] = _Account(Digest(scope, depth, register.transfer_id), register.transfer_id)
        held = Held(store=self._store, head=share.src_head_start, block_ids=block_ids, first_block=0)
        account.nbytes += account.digest.add(held, span or Span(start, end))
        account.spent_s += self._clock() - began

    def closing(self, key: str, message: wire.Message) -> wire.Message:
        """What goes to a peer: where it closes a registration well, with our digests."""
        if not isinstance(message, wire.Landed | wire.Failed):
            return message
        account = self._open.pop((key, message.reg_id), None)
        if account is None or isinstance(message, wire.Failed):
            return message
        depth, digests = account.digest.depth, account.digest.to_bytes()
        self._told(account.transfer_id, "digested", depth, account.nbytes, account.spent_s)
        return msgspec.structs.replace(message, verify=depth, digests=digests)

    def rewound(self, transfer_id: TransferId) -> None:
        """What was written of it will be computed and written anew."""
        self._open = {key: account for key, account in self._open.items() if account.transfer_id != transfer_id}

    def gone(self, peer: str) -> None:
        self._open = {key: account for key, account in self._open.items() if key[0] != peer}
        self._foreseen = {key: known for key, known in self._foreseen.items() if key[0] != peer}

    # -- the decode side --------------------------------------------------------------------------------------------

    def fault(self, peer: Peer, register: wire.Register, message: wire.Landed, read: bool) -> tuple[str, str]:
        """(code, reason) if what landed is not what was registered for, or not what P computed; else ('', ''). `read`:
        we read it, so nobody counted what was written."""
        share = self._share_with("READ", peer)
        foreseen = self._foreseen.pop((peer.key, register.reg_id), None)
        if share is None:
            return "", ""
        if not read:
            wanted = total_bytes(peer.layout, self._layout, share, register.start_token, register.end_token)
            if message.nbytes != wanted:
                return "wrong_size", f"{peer.name} wrote {message.nbytes} bytes, {wanted} were registered for"
        if message.verify == "off" or self._store is None:
            return "", ""
        began, me = self._clock(), self._identity
        if foreseen is not None and message.verify == "sample" and foreseen[0] is register:
            digest = foreseen[1]
        else:
            digest = Digest(self._scope("READ", peer, register, share), message.verify, register.transfer_id)
        held = self._landing_in(register, share)
        nbytes = digest.add(held, Span(register.start_token, register.end_token))
        found = digest.compare(message.digests)
        self._told(register.transfer_id, "verified", message.verify, nbytes, self._clock() - began)
        if found is None:
            return "", ""
        block = found.start_token // self._layout.block_size
        reason = (
            f"layer {found.plane}, block {register.block_ids[block - held.first_block]}, tokens {found.start_token} to "
            f"{found.end_token - 1}: {peer.name} computed {found.computed:016x}, {found.landed:016x} landed on "
            f"{me.engine_id} rank {me.rank}; {found.count} of {found.of} digests differ"
        )
        return KvMismatch.code, reason

    # -- both -------------------------------------------------------------------------------------------------------

    def audit(self, transfer_id: TransferId, block_ids: Sequence[int], first_block: int = 0) -> None:
        """For tests, if it is asked for: SHA-256 of these blocks into the story."""
        if self._audits:
            digests = block_digests(self._layout, block_ids)
            self._story.note(transfer_id, "audit", first_block=first_block, digests=digests)

    def _landing_in(self, register: wire.Register, share: HeadShare) -> Held:
        """On D: where a registration's KV is."""
        assert self._store is not None
        first_block, blocks = register.start_token // self._layout.block_size, register.block_ids
        return Held(store=self._store, head=share.dst_head_start, block_ids=blocks, first_block=first_block)

    def _scope(self, op: Op, peer: Peer, register: wire.Register, share: HeadShare) -> Scope:
        first = heads_of(self._identity.rank, self._identity.tp_size, self._layout.total_heads)[0]
        return Scope(
            start_token=register.start_token,
            end_token=register.end_token,
            planes=len(self._layout.planes),
            first_head=first + (share.src_head_start if op == "WRITE" else share.dst_head_start),
            heads=share.count,
            unit=max(self._layout.block_size, peer.layout.block_size),
            packed=not (self._layout.divisible and peer.layout.divisible),
        )

    def _told(self, transfer_id: TransferId, event: str, depth: wire.Verify, nbytes: int, spent_s: float) -> None:
        self._stats.verified(spent_s)
        self._story.note(transfer_id, event, depth=depth, nbytes=nbytes, ms=round(spent_s * 1e3, 3))
