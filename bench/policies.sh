#!/bin/sh
# Goodput by policy and by binding, on engines with a timing model: 2 prefill, 4 decode. About 20 minutes on
# 2 cores, nothing else running. `bench/policies.sh DIR`: results and figure go there (from the root). $KVFERRY: the command to run.
set -eu
home="$(cd "$(dirname "$0")/.." && pwd)"
cd "$home" # results name the slow profile as it is named here
out="${1:-bench/results/policies-$(date -u +%Y-%m-%d)}"
mkdir -p "$out"
slow="$out/llama-8b-l40s-slow.yaml" # decode-0: its steps take three times as long
sed -e 's/^name: .*/name: llama-8b-l40s-slow/' -e 's/ms: 23$/ms: 69/' \
    "$home/src/kvferry/engine/profiles/llama-8b-l40s.yaml" >"$slow"

goodput() { # NAME ARGUMENTS
    name="$1"
    shift
    [ -e "$out/$name.json" ] && return
    if ! ${KVFERRY:-$home/.venv/bin/kvferry} bench goodput --engine sim --profile llama-8b-l40s \
        --prefill 2 --decode 4 --load builtin --json "$out/$name.json" \
        --vllm-arg=--byte-scale=512 --vllm-arg=--block-size=64 "$@"; then
        rm -f "$out/$name.json" # void: run the script again
        exit 1
    fi
}

# Prefill engines whose cache holds about half of what is shared: 25,600 tokens.
for policy in round_robin least_loaded prefix_aware; do
    goodput "prefill-$policy" --modes push --workload mixed --output-len 32 --prefill-arg=--enable-prefix-caching \
        --input-len 2000 --ttft 1500 --itl 60 --start 8 --ceiling 20 \
        --vllm-arg=--max-model-len=8192 --vllm-arg=--num-gpu-blocks-override=2048 \
        --prefill-arg=--num-gpu-blocks-override=400 \
        --router-arg=--prefill-policy=$policy --router-arg=--decode-policy=least_loaded
done

# Decode engines that are uneven and short of memory: two such prompts each, the first one three times as slow.
for bind in early late; do
    goodput "bind-$bind" --modes stream --workload random --num 200 --input-len 4000 --output-len 64 \
        --ttft 2000 --itl 100 --start 2.5 --ceiling 5 \
        --vllm-arg=--max-model-len=4352 --prefill-arg=--num-gpu-blocks-override=2048 \
        --decode-arg=--num-gpu-blocks-override=132 --engine-arg="decode-0:--profile=$slow" \
        --router-arg=--bind=$bind
done
"${PYTHON:-$home/.venv/bin/python}" "$home/scripts/plot_policies.py" "$out"
