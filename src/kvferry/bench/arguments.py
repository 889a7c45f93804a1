"""Lists in command lines of the benchmarks: commas or blanks between their parts."""

from __future__ import annotations

import argparse


def words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def lengths(text: str) -> list[int]:
    """Token counts, all different."""
    try:
        found = [int(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or min(found) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different token counts from 2 up")
    return found


def rates(text: str) -> list[float]:
    """Requests per second, all different to six digits: files are named by them."""
    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = []
    if (
        not found
        or not all(0 < rate < float("inf") for rate in found)
        or len({f"{rate:g}" for rate in found}) < len(found)
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different requests per second above 0")
    return found


def above_zero(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found
