"""Agents of others are loaded once for as long as they live; those whose connection may be broken are loaded anew."""

from __future__ import annotations

import pytest

from kvferry.transfer.agents import MOST_AT_REST, Agents


class Book:
    """What NIXL was asked for. An agent's name is its metadata's first word."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.agents = Agents(self._load, lambda name: self.said.append(f"-{name}"))

    def _load(self, metadata: bytes) -> str:
        name = metadata.decode().split()[0]
        self.said.append(f"+{name}")
        return name


@pytest.fixture
def book() -> Book:
    return Book()


def test_one_that_comes_again_is_not_loaded_again(book: Book) -> None:
    for _ in range(3):
        assert book.agents.add(b"a 1") == "a" and not book.agents.at_rest("a")
        book.agents.let_go("a")
        assert book.agents.at_rest("a")
    assert book.said == ["+a"]


@pytest.mark.parametrize("when", ["in use", "at rest"])
def test_one_whose_post_has_failed_is_loaded_anew(book: Book, when: str) -> None:
    book.agents.add(b"a 1")
    if when == "at rest":
        book.agents.let_go("a")
    book.agents.failed("a")
    if when == "in use":
        book.agents.let_go("a")
    book.agents.add(b"a 1")
    assert book.said == ["+a", "-a", "+a"] and not book.agents.at_rest("a")


def test_other_metadata_of_the_same_agent_are_loaded(book: Book) -> None:
    book.agents.add(b"a 1")
    book.agents.add(b"a 2")
    assert book.said == ["+a", "+a"]


def test_the_dead_are_removed_in_the_end_and_strangers_are_nothing(book: Book) -> None:
    for number in range(MOST_AT_REST + 3):
        book.agents.add(f"a{number}".encode())
        book.agents.let_go(f"a{number}")
    book.agents.let_go("nobody")
    book.agents.failed("nobody")
    assert [one for one in book.said if one[0] == "-"] == ["-a0", "-a1", "-a2"]
