"""A house of transfer cores per test, left empty."""

from __future__ import annotations

import pytest
from transfer_house import House

from kvferry.transfer.invariants import check_invariants


@pytest.fixture
def house():
    made = House()
    yield made
    for one in made.ranks:
        held = [n for what, n in one.core.open_counts().items() if what != "peers"]
        check_invariants(one.core, idle=not any(held))
        one.core.close()
    assert made.world.fabrics == {} and made.network.links == [] and made.network.listening == {}


@pytest.fixture(params=["push", "pull", "stream"])
def mode(request):
    return request.param
