"""Pull and push of a sweep, side by side: `python scripts/plot_push_vs_pull.py --results-dir D --metric ttft|tpot`.

Four panels where the sweep has four input lengths (or rates, with `--panels qps`). The same as `kvferry bench plot`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvferry.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pull and push of a sweep, side by side.")
    parser.add_argument("--results-dir", type=Path, required=True, metavar="D", help="folder of the sweep")
    parser.add_argument("--metric", choices=("ttft", "tpot"), required=True, help="what to draw")
    parser.add_argument("--panels", choices=("input", "qps"), default="input", help="one per input length, or per rate")
    parser.add_argument("--output-len", metavar="L", help="where the sweep has several")
    parser.add_argument("--out", type=Path, metavar="F", help=".png or .svg (default: D/push_vs_pull_METRIC.png)")
    args = parser.parse_args()
    out = args.out or args.results_dir / f"push_vs_pull_{args.metric}.png"
    sys.exit(
        main(
            [
                *("bench", "plot", "--results", str(args.results_dir), "--metric", args.metric),
                *("--panels", args.panels, "--out", str(out)),
                *(("--output-len", args.output_len) if args.output_len else ()),
            ]
        )
    )
