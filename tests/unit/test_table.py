from __future__ import annotations

import inspect

import pytest

from kvferry.protocol import landing, legs, rendezvous
from kvferry.protocol.table import UnexpectedEvent, mermaid, transition

MACHINES = [legs, landing]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_every_action_is_handled(machine):
    cls = rendezvous.Rendezvous if machine is legs else landing.Landings
    source = inspect.getsource(cls._apply)
    for _, action in machine.LEG_TABLE.values():
        assert not action or f'"{action}"' in source, f"{action} is in the table only"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_every_state_is_reached_and_only_ends_are_left_by_nothing(machine):
    states = set(machine.Leg)
    reached = {target for target, _ in machine.LEG_TABLE.values()}
    left = {state for state, _ in machine.LEG_TABLE}
    first = next(iter(machine.Leg))
    assert reached | {first} == states
    ends = {legs.Leg.ENDED} if machine is legs else set(landing._OVER)
    assert states - left == ends


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_a_lost_peer_and_a_stop_are_expected_in_every_live_state(machine):
    stops = [legs.PeerGone, legs.SourceLost] if machine is legs else [landing.PeerGone, landing.Stop]
    for state in {state for state, _ in machine.LEG_TABLE}:
        for event in stops:
            assert (state, event) in machine.LEG_TABLE


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_diagram_has_each_row(machine):
    lines = mermaid(machine.LEG_TABLE).splitlines()
    assert lines[0] == "stateDiagram-v2" and len(lines) == len(machine.LEG_TABLE) + 1
    for (state, event), (target, action) in machine.LEG_TABLE.items():
        wanted = f"    {state.name} --> {target.name}: {event.__name__}" + (f" / {action}" if action else "")
        assert wanted in lines


def test_unlisted_event_is_an_error_that_names_both():
    with pytest.raises(UnexpectedEvent, match="prefill leg: WriteDone is not expected in state HELD"):
        transition(legs.LEG_TABLE, "prefill leg", legs.Leg.HELD, legs.WriteDone())
