"""A prompt is known by its token ids: the same ones on both sides, or one more on D's."""

from __future__ import annotations

import pytest

from kvferry.protocol.messages import Register
from kvferry.protocol.prompt import mark_prompt, mismatch, prompt_digest

LENGTHS = [1, 2, 15, 16, 17, 18, 500, 65_535, 65_536, 65_537]  # msgpack's lists change their header at 16 and 65,536


def ids(count: int) -> list[int]:
    return [position * 7919 % 151_936 for position in range(count)]


def register(prompt: str, end: int, start: int = 0) -> Register:
    return Register(
        reg_id=1,
        transfer_id="t",
        mode="push",
        start_token=start,
        end_token=end,
        block_ids=(),
        legs=1,
        credit=1,
        prompt=prompt,
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mark_knows_all_tokens_and_all_but_the_last(length: int) -> None:
    made = mark_prompt(ids(length))
    assert made.tokens == length
    assert made.whole == prompt_digest(ids(length)) and made.but_last == prompt_digest(ids(length)[:-1])


def test_digests_tell_prompts_apart() -> None:
    prompts = [
        ids(20),
        [*ids(19), 1],
        [0, *ids(19)],
        ids(20)[::-1],
        ids(21),
        ids(19),
        [12, 800],
        [12, 8, 0],
        [128],
        [1, 28],
    ]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("end", [19, 20])
def test_d_has_the_same_prompt_or_one_token_more(end: int) -> None:
    have = mark_prompt(ids(20))
    assert mismatch(have, register(prompt_digest(ids(end)), end)) == ""
    other = [1, *ids(end)[1:]]
    told = mismatch(have, register(prompt_digest(other), end))
    assert told.startswith(f"the first {end} token ids differ: prefill side has ")


@pytest.mark.parametrize("end", [5, 18, 21])
def test_other_lengths_are_other_prompts(end: int) -> None:
    told = mismatch(mark_prompt(ids(20)), register(prompt_digest(ids(end)), end))
    assert told == f"decode side has a prompt of {end + 1} tokens, prefill side one of 20"


def test_who_does_not_know_is_believed() -> None:
    have = mark_prompt(ids(20))
    assert mismatch(None, register("abc", 19)) == "" == mismatch(have, register("", 19))
    assert mismatch(have, register("abc", 19, start=19)) == "", "nothing is taken"
