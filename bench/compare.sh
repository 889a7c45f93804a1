#!/bin/sh
# The full run: both of our modes, both of vLLM's, and one plain engine. Further arguments are passed on.
set -eu
cd "$(dirname "$0")/.."
out="bench/results/$(date -u +%Y-%m-%dT%H%M)"
exec .venv/bin/kvferry bench compare --engine vllm --model smollm2 \
    --modes push,upstream-push,pull,upstream-pull,colocated \
    --input-lens 500 --output-tokens 32 --num 10 --rounds 2 --json "$out.json" --markdown "$out.md" "$@"
