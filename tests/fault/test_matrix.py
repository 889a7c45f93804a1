"""Every cell of the failure matrix, run with real cores over the in-memory fabric and channel, and the real router."""

from __future__ import annotations

import failure_client
import failure_matrix
import pytest
from failure_cells import CLOCK, Cell, End
from failure_rows import CONFIG, STRIKES
from failure_scene import LIMITS, STEP_S, Scene, Told

from kvferry.transfer.invariants import check_invariants

RUN = [(cell, mode) for cell in failure_matrix.cells() if not cell.impossible for mode in cell.modes]


def case(cell: Cell, mode: str) -> object:
    marks = [pytest.mark.xfail(reason=cell.open, strict=True)] if cell.open else []
    return pytest.param(cell, mode, id=f"{cell.row}-{cell.stage}-{mode}".replace(" ", "_"), marks=marks)


def test_every_cell_is_there_once() -> None:
    assert failure_matrix.missing() == []
    assert {row.name for row in failure_matrix.MATRIX} == {*STRIKES, "request preempted on D"}


@pytest.mark.parametrize(("cell", "mode"), [case(*one) for one in RUN])
def test_cell(cell: Cell, mode: str) -> None:
    scene = Scene(mode, STRIKES[cell.row], **CONFIG.get(cell.row, {}))
    scene.run_to(cell.stage)
    scene.play()
    assert scene.moved() == cell.metrics()
    keeps_word(scene.told["P"], cell.p)
    keeps_word(scene.told["D"], cell.d)
    scene.bytes_are_right()
    assert failure_client.told(cell, mode, scene) == cell.client
    for code, at in scene.others:
        assert code == "lease_lapsed" and abs(at - LIMITS["lease_s"]) <= 3 * STEP_S
    assert bool(scene.others) == ("expired" in cell.flags) and len(scene.others) in (0, 40)
    scene.settled()
    scene.fresh_transfer()
    for rank in scene.ranks:
        check_invariants(rank.core, idle=True)
    for rank in scene.ranks:
        rank.core.close()


def keeps_word(told: Told, end: End) -> None:
    if end.code == "had":
        assert (told.code, told.ends, told.at) == ("ok", 1, None)
    elif end.code == "dead":  # it may have ended well before it died
        assert told.code in (None, "ok") and told.ends <= 1
    elif not end.hears:
        assert (told.code, told.ends) == (None, 0)
    else:
        assert (told.code, told.ends) == (end.code, 1)
        for measured, names in ((told.at, end.told), (told.freed, end.freed)):
            assert measured is not None
            slack = 4 * STEP_S if "slow" not in names else CLOCK["slow"][0]
            slack += LIMITS["connect_timeout_s"] if "heard" in names else 0.0  # until D greets again
            promised = sum(CLOCK[name][0] for name in names)
            assert abs(measured - promised) <= slack, f"after {measured:g} s instead of {promised:g}"
