"""The chunks of a stream in its story: each is `posted` and `written` by itself, and there may be hundreds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

FIXED = {"t", "transfer_id", "side", "rank", "event"}
"""What every line of a story has; the rest are its event's facts."""
_CHUNKED = ("posted", "written")


def streamed(story: Sequence[dict[str, Any]]) -> bool:
    """KV left while prefill ran, or could have. A transfer that failed early may not tell."""
    return any(
        line["event"] in ("sealed", "rewound") or (line["event"] == "dispatched" and line.get("mode") == "stream")
        for line in story
    )


def gathered(story: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The story with chunks numbered, in the order in which their rank posted or saw them, and put together."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for chunked, run in groupby(story, lambda line: line["event"] in _CHUNKED):
        if not chunked:
            yield from run
            continue
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for line in run:
            groups.setdefault((line["side"], line.get("rank", 0), line["event"]), []).append(line)
        for key, lines in groups.items():
            yield _together(lines, seen[key] + 1)
            seen[key] += len(lines)


def _together(lines: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    """One line for these chunks, the first of which has this number: sizes added up, milliseconds from the least to
    the most, `for_ms` from the first to the last."""
    first, last = lines[0], lines[-1]
    whole = {key: value for key, value in first.items() if key in FIXED}
    if len(lines) == 1:
        return whole | {"chunk": number} | first
    whole |= {"chunks": f"{number}..{number + len(lines) - 1}"}
    whole |= {"for_ms": round((float(last["t"]) - float(first["t"])) * 1e3, 3)}
    for key, value in first.items():
        values = [line.get(key, value) for line in lines]
        if key in FIXED:
            continue
        if key.endswith("_ms"):
            whole[key] = f"{min(values)}..{max(values)}"
        else:
            whole[key] = sum(values) if isinstance(value, int) else value
    return whole
