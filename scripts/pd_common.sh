# Read by serve_pd.sh, run_sweep.sh and cleanup.sh: the interpreter, checks of variables, marks of what runs.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$here/../.venv/bin/python" ] || PYTHON=$here/../.venv/bin/python
fi
# Where started processes are noted, for cleanup.sh.
RUN_DIR=${RUN_DIR:-${TMPDIR:-/tmp}/kvferry-pd-$(id -u)}

fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 1
}

# need NAME WHAT: the variable must be set.
need() {
    eval "value=\${$1:-}"
    [ -n "$value" ] || fail "$1 is not set: $2"
}

# one_of NAME VALUE CHOICE...
one_of() {
    name=$1 value=$2
    shift 2
    for choice in "$@"; do
        [ "$value" != "$choice" ] || return 0
    done
    fail "$name: '$value' is not one of: $*"
}

# marker: a new value of KVFERRY_TREE, by which descendants of a process are found.
marker() {
    KVFERRY_TREE=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(8))')
    export KVFERRY_TREE
}

# mark NAME PID: note a process by pid, start time and marker. One that has ended already is not noted.
mark() {
    mkdir -p "$RUN_DIR"
    started=$("$PYTHON" - "$2" <<'PYTHON'
import sys

import psutil

try:
    print(psutil.Process(int(sys.argv[1])).create_time())
except psutil.NoSuchProcess:
    pass
PYTHON
    )
    [ -n "$started" ] || return 0
    echo "$2 $started $KVFERRY_TREE" >"$RUN_DIR/.$1"
    mv "$RUN_DIR/.$1" "$RUN_DIR/$1"
}
