"""What the router can't start with is one error that names option and value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.errors import ConfigError
from kvferry.listener import bind
from kvferry.router.engines.discovery import source_of
from kvferry.router.seen.tracing import tracing_to
from kvferry.story import Story


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda: Story("/dev/null/x", "router"), "story_dir: /dev/null/x: Not a directory"),
        (lambda: tracing_to("collector:4317"), "--otlp-traces-endpoint: 'collector:4317' (expected a collector's URL"),
        (lambda: source_of("file:/nowhere/e.yaml"), "--discover 'file:/nowhere/e.yaml': /nowhere/e.yaml: No such file"),
        (lambda: bind("127.0.0.1", 70000), "port: 70000 is not a port"),
    ],
)
def test_one_line_names_option_and_value(start: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start()
    assert said in str(caught.value) and "\n" not in str(caught.value)
