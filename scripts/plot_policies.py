"""Goodput of each variant in a folder of `bench goodput` results, as bars: FOLDER/goodput.png, and a table on stdout.

Variants whose names begin alike (`prefill-`, `bind-`) share a panel; each bar is the rate that held, and says how many
times the first one's it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvferry.bench.figures import pyplot
from kvferry.bench.report import aligned
from kvferry.errors import ConfigError

COLOURS = ("#4d4d4d", "#1b6ca8", "#c8502d")
FIRST = ("round_robin", "early")
"""What the others are compared with."""


def variants(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Panel -> variant -> result. Raises `ConfigError`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        panel, _, name = path.stem.partition("-")
        facts = json.loads(path.read_bytes())
        try:
            (result,) = facts["results"]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: expected the result of `bench goodput` in one mode") from None
        found.setdefault(panel, {})[name] = result | {"objectives": facts["objectives"]}
    if not found:
        raise ConfigError(f"{folder}: no result of `bench goodput --json`", hint="run bench/policies.sh")
    return {
        panel: dict(sorted(there.items(), key=lambda item: (item[0] not in FIRST, item[0])))
        for panel, there in found.items()
    }


def rows(found: dict[str, dict[str, dict[str, Any]]]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("panel", "variant", "rate that held /s", "times the first", "TTFT p99 ms", "")]
    for panel, there in found.items():
        base = next(iter(there.values()))["rate"]
        for name, result in there.items():
            rate, p99 = result["rate"], (result["ttft_ms"] or {}).get("p99")
            times = f"{rate / base:.2f}" if rate and base else "-"
            told = (f"{rate:.3g}" if rate else "0", times, f"{p99:.0f}" if p99 is not None else "-", result["limit"])
            table.append((panel, name, *told))
    return table


def draw(found: dict[str, dict[str, dict[str, Any]]], out: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), squeeze=False, layout="constrained")
    for axis, (panel, there) in zip(axes[0], found.items(), strict=True):
        rates = [result["rate"] or 0.0 for result in there.values()]
        bars = axis.bar(list(there), rates, color=COLOURS[: len(there)], width=0.6)
        labels = [f"{rate:.1f}" + (f" ({rate / rates[0]:.2f}x)" if rates[0] else "") for rate in rates]
        axis.bar_label(bars, labels, padding=2)
        goals = next(iter(there.values()))["objectives"]
        axis.set_title(f"{panel}: TTFT {goals['ttft_ms']:g} ms, ITL {goals['itl_ms']:g} ms", fontsize=10)
        axis.set_ylabel("requests/s of which 99% meet both")
        axis.set_ylim(0, 1.2 * max(rates, default=1.0) or 1.0)
    figure.savefig(out, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        found = variants(folder)
        draw(found, folder / "goodput.png")
    except ConfigError as error:
        print(f"plot_policies: {error}", file=sys.stderr)
        return 1
    print(aligned(rows(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
