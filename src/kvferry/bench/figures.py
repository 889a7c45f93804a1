"""Figures with matplotlib (the extra `plot`), drawn without a display: panels of a sweep, and one transfer in time."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvferry.bench.captions import caption, wrapped
from kvferry.bench.points import write_whole
from kvferry.bench.series import Results, Series
from kvferry.errors import ConfigError
from kvferry.launch.timeline import PULL_LABELS, actor, spans

COLOURS = {
    "colocated": "#4d4d4d",
    "pull": "#1b6ca8",
    "push": "#c8502d",
    "stream": "#2e8b57",
    "pull-inline": "#7fb2d6",
    "upstream-pull": "#8a6bb1",
    "upstream-push": "#d6a13b",
}
SPARE = ("#008080", "#a0522d", "#708090")
MARKS = {"colocated": "s", "pull": "o", "push": "^", "stream": "D"}
DASHES = {"push": (0, (4, 2))}
"""So that a line under it can be seen."""
BAND = (10, 90)
"""Percentiles of the band around the median."""
TITLES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "itl": "time between tokens, ms",
    "goodput": "requests/s within both objectives",
}
Panels = Literal["input", "qps"]


def pyplot() -> Any:
    """matplotlib.pyplot on the Agg backend. Raises `ConfigError` where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib", hint="pip install 'kvferry[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            **{"font.size": 10, "axes.grid": True, "grid.alpha": 0.3},
            **{"svg.fonttype": "none", "svg.hashsalt": "kvferry", "text.parse_math": False},
        }
    )
    return plt


def panels(
    results: Results,
    metric: str,
    by: Panels,
    objectives: tuple[float, float] | None = None,
    output_len: int | None = None,
) -> Any:
    """A figure with one panel per input length (`by` 'input') or per rate ('qps'), the other one along x, a line per
    mode. Lines are medians, bands run from the 10th to the 90th percentile of all requests. `objectives`: TTFT and ITL
    in milliseconds, for goodput.
    """
    if not results.series:
        raise ConfigError(
            f"--results: all {len(results.void)} points were refused", hint="`kvferry bench report` says why"
        )
    series = [entry for entry in results.series if output_len in (None, entry.output_len)]
    lengths = sorted({entry.output_len for entry in series})
    if len(lengths) != 1:
        there = sorted({entry.output_len for entry in results.series})
        said = f"the folder has output lengths {', '.join(map(str, there))}"
        raise ConfigError(f"--output-len: {said}", hint="a figure shows one, choose it with --output-len")
    wide: Callable[[Series], float] = (lambda e: e.input_len) if by == "input" else (lambda e: e.qps)
    along: Callable[[Series], float] = (lambda e: e.qps) if by == "input" else (lambda e: e.input_len)
    titles = sorted({wide(entry) for entry in series})
    columns = min(2, len(titles)) if len(titles) != 3 else 3
    rows = -(-len(titles) // columns)
    what = "median, band p10 to p90" if metric != "goodput" else _goals(objectives)
    text = wrapped(f"{what}; {caption(results, lengths[0])}", 66 * columns)
    head, foot = 0.45, 0.25 + 0.14 * (1 + text.count("\n"))
    plt = pyplot()
    height = 3.3 * rows + head + foot
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns + 0.4, height), squeeze=False)
    handles: dict[str, Any] = {}
    colour_of = colours(results.modes())
    for number, (axis, title) in enumerate(zip(axes.flat, titles, strict=False)):
        here = [entry for entry in series if wide(entry) == title]
        _panel(axis, here, metric, along, objectives, handles, colour_of)
        axis.set_title(f"{title:g} prompt tokens" if by == "input" else f"{title:g} requests/s", fontsize=10)
        if number >= len(titles) - columns:
            axis.set_xlabel("requests/s" if by == "input" else "prompt tokens")
        if number % columns == 0:
            axis.set_ylabel(TITLES[metric])
    for axis in list(axes.flat)[len(titles) :]:
        axis.set_visible(False)
    named = [mode for mode in results.modes() if mode in handles]
    figure.legend(
        [handles[mode] for mode in named], named, loc="upper center", ncols=min(len(named), 3 * columns), frameon=False
    )
    figure.text(0.5, 0.08 / height, text, ha="center", va="bottom", fontsize=7.5, color="#444444")
    figure.tight_layout(rect=(0, foot / height, 1, 1 - head / height))
    return figure


def colours(modes: Sequence[str]) -> dict[str, str]:
    """One for each mode, the same in every figure of a folder; black for what is left when all are given away."""
    spare = iter(SPARE)
    return {mode: COLOURS.get(mode) or next(spare, "#000000") for mode in modes}


def _panel(
    axis: Any,
    series: Sequence[Series],
    metric: str,
    along: Callable[[Series], float],
    objectives: tuple[float, float] | None,
    handles: dict[str, Any],
    colour_of: dict[str, str],
) -> None:
    """A point that a mode has not is a gap in its line."""
    x = sorted({along(entry) for entry in series})
    top = 0.0
    for mode in dict.fromkeys(entry.mode for entry in series):
        mine = {along(entry): entry for entry in series if entry.mode == mode}
        drawn = [_drawn(mine[at], metric, objectives) if at in mine else NOTHING for at in x]
        middle, low, high = (list(values) for values in zip(*drawn, strict=True))
        colour, dashes = colour_of[mode], DASHES.get(mode, "-")
        if metric != "goodput":
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axis.plot(x, high, color=colour, linewidth=0.7, alpha=0.7, linestyle=dashes)
            for at, bottom, end in _alone(x, low, high):
                axis.plot([at, at], [bottom, end], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
        style = {"marker": MARKS.get(mode, "o"), "linestyle": dashes}
        line = axis.plot(x, middle, color=colour, markersize=4.5, linewidth=1.6, label=mode, **style)
        handles.setdefault(mode, line[0])
        top = max([top, *(value for value in (*middle, *high) if not math.isnan(value))])
    axis.set_ylim(0, top * 1.08 or 1)
    axis.set_xticks(x)
    names = axis.set_xticklabels([f"{value:g}" for value in x])
    if len(x) > 1 and min(b - a for a, b in itertools.pairwise(x)) < (x[-1] - x[0]) / 16:
        for name in names:
            name.set(rotation=60, fontsize=7)


NOTHING = (math.nan,) * 3


def _drawn(entry: Series, metric: str, objectives: tuple[float, float] | None) -> tuple[float, float, float]:
    """Middle, and both ends of the band."""
    if metric == "goodput":
        assert objectives is not None
        good = entry.goodput(*objectives)
        return good, good, good
    values = entry.values(metric)
    return _percentiles(values) if values else NOTHING


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    middle, low, high = np.percentile(values, [50, *BAND])
    return float(middle), float(low), float(high)


def _alone(x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Iterator[tuple[float, float, float]]:
    """What no band can be drawn through, since nothing is beside it."""
    for index, at in enumerate(x):
        beside = [high[i] for i in (index - 1, index + 1) if 0 <= i < len(x)]
        if not math.isnan(high[index]) and all(map(math.isnan, beside)):
            yield at, low[index], high[index]


def _goals(objectives: tuple[float, float] | None) -> str:
    assert objectives is not None
    return f"within {objectives[0]:g} ms TTFT and {objectives[1]:g} ms mean ITL of the request"


def timeline(story: Sequence[dict[str, Any]], text: str) -> Any:
    """One transfer: a bar per step up to the first token, in milliseconds since its request came."""
    steps = spans(story, [label for label in PULL_LABELS if label != "last token"])
    if not steps:
        raise ConfigError("this story has none of the steps of a transfer", hint="was it one that failed at once?")
    begun = min(float(line["t"]) for line in story)
    first = next((end for _, event, _, end in steps if event == "first_token"), max(end for *_, end in steps))
    whole = max((first - begun) * 1e3, 1e-3)
    text = wrapped(text, 130)
    head, foot = 0.5, 0.25 + 0.14 * (1 + text.count("\n"))
    plt = pyplot()
    height = 0.38 * len(steps) + 0.5 + head + foot
    figure, axis = plt.subplots(figsize=(9.6, height))
    sides = {"router": "#4d4d4d", "P": "#1b6ca8", "D": "#c8502d"}
    rows = sorted(steps, key=lambda step: (step[3], step[2]))
    for row, (_, event, start, end) in enumerate(rows):
        left, width = (start - begun) * 1e3, max(0.0, (min(end, first) - start) * 1e3)
        colour = sides.get(actor(story, event), "#888888")
        axis.barh(row, max(width, whole * 0.002), left=left, height=0.6, color=colour)
        axis.text(left + width + whole * 0.008, row, f"{(end - start) * 1e3:.1f} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)))
    axis.set_yticklabels([label for label, *_ in rows])
    axis.invert_yaxis()
    axis.set_axisbelow(True)
    axis.set_xlim(0, whole * 1.12)
    axis.set_xlabel("ms since the request came")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in sides.values()]
    names = ("router", "prefill engine", "decode engine")
    axis.legend(patches, names, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=9)
    figure.text(0.5, 0.08 / height, text, ha="center", va="bottom", fontsize=7.5, color="#444444")
    figure.tight_layout(rect=(0, foot / height, 1, 1))
    return figure


def save(figure: Any, path: Path) -> None:
    """By the name's end: .png or .svg. Raises `ConfigError` where it can't be written."""
    drawn = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=metadata)
    pyplot().close(figure)
    write_whole(path, drawn.getvalue())


def svg(figure: Any) -> str:
    """The figure as an <svg> element, without the XML head."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
