"""What must be true of the two machines at any time, and what once they hold nothing. Looks only; for checks."""

from __future__ import annotations

from collections import Counter

from kvferry.protocol.instructions import PeerKey
from kvferry.protocol.landing import Landings
from kvferry.protocol.rendezvous import Rendezvous


def inconsistencies(machine: Rendezvous | Landings) -> list[str]:
    """What must never be, in words."""
    return _of_sources(machine) if isinstance(machine, Rendezvous) else _of_landings(machine)


def _of_sources(machine: Rendezvous) -> list[str]:
    sources, index = machine._sources, machine._by_leg
    found = [
        f"{source.transfer_id}: registration {key} is not in the index"
        for source in sources.values()
        for key in source.legs
        if index.get(key) != source.transfer_id
    ]
    if len(index) != sum(len(source.legs) for source in sources.values()):
        found.append("the index knows registrations that no source has")
    flying: Counter[PeerKey] = Counter()
    for source in sources.values():
        if source.transfer_id in machine._ended:
            found.append(f"{source.transfer_id} is open and has ended")
        for leg in source.legs.values():
            flying[leg.peer] += leg.flying if leg.register.mode == "stream" else 0
    if +flying != machine._flying:
        found.append(f"streamed WRITEs in flight: {dict(machine._flying)} counted, {dict(+flying)} are")
    return found


def _of_landings(machine: Landings) -> list[str]:
    landings = machine._landings
    indexed = {reg_id: key for key, one in landings.items() for reg_id in one.legs}
    found = [] if indexed == machine._by_reg else ["the index of registrations is not that of the landings"]
    found += [f"landing {key} is over and still here" for key, one in landings.items() if one.over()]
    owner: dict[int, str] = {}
    for key, one in landings.items():
        for block in one.destination.block_ids:
            if owner.setdefault(block, key) != key:
                found.append(f"block {block} is the destination of {owner[block]!r} and of {key!r}")
    return found


def left_over(machine: Rendezvous | Landings) -> list[str]:
    """With nothing open: what should have gone with it."""
    if isinstance(machine, Rendezvous):
        side, index, counts = "prefill", len(machine._by_leg), len(machine._flying)
    else:
        side, index, counts = "decode", len(machine._by_reg), 0
    kept = (("registrations", index), ("deadlines", len(machine._deadlines)), ("WRITE counts", counts))
    return [f"{number} {what} are left on the {side} side" for what, number in kept if number]
