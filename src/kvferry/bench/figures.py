"""Figures with matplotlib (the extra `plot`), drawn without a display: panels of a sweep, and one transfer in time."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

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
        {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.fonttype": "none", "svg.hashsalt": "kvferry"}
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
    series = [entry for entry in results.series if output_len in (None, entry.output_len)]
    lengths = sorted({entry.output_len for entry in series})
    if len(lengths) != 1:
        said = f"the folder has output lengths {', '.join(map(str, lengths))}" if lengths else "no such output length"
        raise ConfigError(f"--output-len: {said}", hint="a figure shows one, choose it with --output-len")
    wide: Callable[[Series], float] = (lambda e: e.input_len) if by == "input" else (lambda e: e.qps)
    along: Callable[[Series], float] = (lambda e: e.qps) if by == "input" else (lambda e: e.input_len)
    titles = sorted({wide(entry) for entry in series})
    columns = min(2, len(titles)) if len(titles) != 3 else 3
    rows = -(-len(titles) // columns)
    plt = pyplot()
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns + 0.4, 3.3 * rows + 1.1), squeeze=False)
    handles: dict[str, Any] = {}
    for number, (axis, title) in enumerate(zip(axes.flat, titles, strict=False)):
        here = [entry for entry in series if wide(entry) == title]
        _panel(axis, here, metric, along, objectives, handles)
        axis.set_title(f"{title:g} prompt tokens" if by == "input" else f"{title:g} requests/s", fontsize=10)
        axis.set_ylim(bottom=0)
        if number >= len(titles) - columns:
            axis.set_xlabel("requests/s" if by == "input" else "prompt tokens")
        if number % columns == 0:
            axis.set_ylabel(TITLES[metric])
    for axis in list(axes.flat)[len(titles) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=max(1, len(handles)), frameon=False)
    what = "median, band p10 to p90" if metric != "goodput" else _goals(objectives)
    text = f"{what}; {caption(results, lengths[0])}"
    figure.text(0.5, 0.005, _wrapped(text, 62 * columns), ha="center", va="bottom", fontsize=7.5, color="#444444")
    figure.tight_layout(rect=(0, 0.02 + 0.035 * (3 - rows if rows < 3 else 1), 1, 0.93))
    return figure


def _panel(
    axis: Any,
    series: Sequence[Series],
    metric: str,
    along: Callable[[Series], float],
    objectives: tuple[float, float] | None,
    handles: dict[str, Any],
) -> None:
    spare = iter(SPARE)
    for mode in dict.fromkeys(entry.mode for entry in series):
        mine = sorted((entry for entry in series if entry.mode == mode), key=along)
        x = [along(entry) for entry in mine]
        colour = COLOURS.get(mode) or next(spare, "#000000")
        if metric == "goodput":
            assert objectives is not None
            middle = [entry.goodput(*objectives) for entry in mine]
        else:
            values = [entry.values(metric) or [float("nan")] for entry in mine]
            middle = [float(np.median(some)) for some in values]
            low, high = ([float(np.percentile(some, p)) for some in values] for p in BAND)
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axis.plot(x, high, color=colour, linewidth=0.7, alpha=0.7, linestyle=DASHES.get(mode, "-"))
        style = {"marker": MARKS.get(mode, "o"), "linestyle": DASHES.get(mode, "-")}
        line = axis.plot(x, middle, color=colour, markersize=4.5, linewidth=1.6, label=mode, **style)
        handles.setdefault(mode, line[0])
        axis.set_xticks(sorted({along(entry) for entry in series}))
        axis.set_xticklabels([f"{value:g}" for value in sorted({along(entry) for entry in series})])


def _goals(objectives: tuple[float, float] | None) -> str:
    assert objectives is not None
    return f"within {objectives[0]:g} ms TTFT and {objectives[1]:g} ms mean ITL of the request"


def caption(results: Results, output_len: int) -> str:
    """Hardware, model or profile, lengths, count, seed: what a reader must know to judge the figure."""
    lengths = sorted({entry.input_len for entry in results.series if entry.output_len == output_len})
    counts = sorted({len(entry.ttft) for entry in results.series if entry.output_len == output_len})
    many = "/".join(map(str, counts))
    text = f"prompts of {', '.join(map(str, lengths))} tokens, {output_len} out, {many} requests per point"
    ours = results.ours()
    if not ours:
        return text
    about, settings = ours[0]["environment"], ours[0].get("settings", {})
    return f"{what(settings)}; {text}; seed {settings.get('seed')}; {hardware(about)}; load {settings.get('load')}"


def what(settings: dict[str, Any]) -> str:
    """The served model, and whether it computes."""
    if settings.get("engine") == "sim":
        return f"modelled engine, profile {settings['profile']}, real transfers"
    return f"model {Path(str(settings.get('model', '?'))).name}"


def hardware(about: dict[str, Any]) -> str:
    gpus = f", {about['gpus']}" if about.get("gpus") else ""
    return f"on {about['cores']} cores of {about['cpu_model']}, {about['memory_gib']} GiB{gpus}"


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def timeline(story: Sequence[dict[str, Any]], caption: str) -> Any:
    """One transfer: a bar per step up to the first token, in milliseconds since its request came."""
    steps = spans(story, [label for label in PULL_LABELS if label != "last token"])
    if not steps:
        raise ConfigError("this story has none of the steps of a transfer", hint="was it one that failed at once?")
    begun = min(float(line["t"]) for line in story)
    first = next((end for _, event, _, end in steps if event == "first_token"), max(end for *_, end in steps))
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9.6, 0.38 * len(steps) + 1.4))
    colours = {"router": "#4d4d4d", "P": "#1b6ca8", "D": "#c8502d"}
    for row, (_, event, start, end) in enumerate(sorted(steps, key=lambda step: (step[3], step[2]))):
        side = actor(story, event)
        left, width = (start - begun) * 1e3, (min(end, first) - start) * 1e3
        axis.barh(row, max(width, (first - begun) * 2), left=left, height=0.6, color=colours.get(side, "#888888"))
        axis.text(
            left + max(width, 0) + (first - begun) * 8, row, f"{(end - start) * 1e3:.1f} ms", va="center", fontsize=8
        )
    axis.set_yticks(range(len(steps)))
    axis.set_yticklabels([label for label, *_ in sorted(steps, key=lambda step: (step[3], step[2]))])
    axis.invert_yaxis()
    axis.set_xlim(0, (first - begun) * 1e3 * 1.12)
    axis.set_xlabel("ms since the request came")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    names = ("router", "prefill engine", "decode engine")
    axis.legend(patches, names, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=9)
    figure.text(0.5, 0.005, _wrapped(caption, 130), ha="center", va="bottom", fontsize=7.5, color="#444444")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def save(figure: Any, path: Path) -> None:
    """By the name's end: .png or .svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)


def svg(figure: Any) -> str:
    """The figure as an <svg> element, without the XML head."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
