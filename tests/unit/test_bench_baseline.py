import os
import sys
import types

import pytest

from kvferry.bench import baseline


@pytest.fixture
def module(monkeypatch):
    fake = types.ModuleType("kvferry_fake_base_worker")
    fake.os = os
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(baseline, "TARGET", fake.__name__)
    return fake


def test_nothing_happens_without_the_switch(module, monkeypatch):
    monkeypatch.delenv(baseline.SWITCH, raising=False)
    baseline.register()
    assert module.os is os


def test_only_that_call_of_that_module_is_left_out(module, monkeypatch, caplog):
    monkeypatch.setenv(baseline.SWITCH, "1")
    before = os.sched_getaffinity(0)
    baseline.register()
    seen = module.os
    baseline.register()
    assert module.os is seen
    with caplog.at_level("INFO", logger="vllm.kvferry.bench"):
        module.os.sched_setaffinity(0, [max(before)])
    assert os.sched_getaffinity(0) == before
    assert module.os.getpid() == os.getpid()
    assert hasattr(module.os, "sched_setaffinity")
    assert os.sched_setaffinity is not module.os.sched_setaffinity


def test_an_engine_without_that_connector_still_starts(monkeypatch):
    monkeypatch.setenv(baseline.SWITCH, "1")
    monkeypatch.setattr(baseline, "TARGET", "kvferry_no_such_module")
    baseline.register()
