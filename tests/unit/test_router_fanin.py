"""One of several prompts in a stream: numbers of choices, and what is no choice."""

from __future__ import annotations

import pytest

from kvferry.router.dispatch.fanin import Closing, Part


def test_choices_are_numbered_behind_those_before() -> None:
    event = {"created": 7, "choices": [{"index": 1, "text": "x"}]}
    assert Part(2, 3, Closing()).event(event) is True
    assert event["choices"] == [{"index": 7, "text": "x"}]


def test_the_last_events_are_kept_for_the_end() -> None:
    closing = Closing()
    assert Part(0, 1, closing).event({"choices": [], "usage": {"prompt_tokens": 2}}) is None
    assert Part(1, 1, closing).event({"choices": [], "usage": {"prompt_tokens": 3}}) is None
    assert b'"prompt_tokens":5' in closing.event()


@pytest.mark.parametrize("choices", ["text", {"index": 0}, [None], [3]])
def test_what_is_no_choice_goes_out_as_it_came(choices: object) -> None:
    event = {"choices": choices}
    assert Part(1, 1, Closing()).event(event) is False
    assert event == {"choices": choices}


def test_an_index_that_is_none() -> None:
    event = {"choices": [{"index": "one"}]}
    assert Part(1, 2, Closing()).event(event) is True
    assert event["choices"] == [{"index": 2}]
