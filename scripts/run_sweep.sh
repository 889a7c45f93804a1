#!/bin/sh
# The published sweep against a pair that serve_pd.sh started on two machines; run it on a third one. Starts the router
# here for it, and ends it again; with ROUTER_URL it asks a router that runs already.
#
#   PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODE=push MODEL=/models/m \
#   QPS_LIST="1 2 4 8" INPUT_LENS="1000 4000 16000" OUTPUT_LENS=128 scripts/run_sweep.sh
#
#   MODE                         pull or push, as both engines have it
#   QPS_LIST INPUT_LENS OUTPUT_LENS  lists, with blanks or commas (defaults: 1,2,4,8  1000,4000,8000,16000  128)
#   NUM ITERATIONS RESULTS       requests per run (100), runs per point (1), folder for results (results)
#   MODEL                        folder of the model, for its tokenizer and the size of its KV
#   PREFILL_IP DECODE_IP         of the two machines; their ports are 8100 and 8200
#   PREFILL_ENGINE_ID PREFILL_KV_HOST PREFILL_SIDE_CHANNEL_PORT PREFILL_TP_SIZE PREFILL_PP_SIZE
#                                the prefill engine's side of the transfer (prefill-0, PREFILL_IP, 5600, 1, 1)
#   DECODE_TP_SIZE               (1)
#   ROUTER_PORT ROUTER_URL       port for the router (8000), or one that runs already
#   STORY_DIR                    folder with the engines' stories, if this machine sees it
# Further arguments go to `kvferry bench sweep`. Prefix caching must be off on both engines: serve_pd.sh sees to it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/pd_common.sh"

mode=${MODE:-}
one_of MODE "$mode" pull push
need MODEL "folder of the model, for its tokenizer"
[ "${PREFILL_PP_SIZE:-1}" = 1 ] || fail "PREFILL_PP_SIZE: '$PREFILL_PP_SIZE', pipeline parallelism is not supported: expected 1"

router=${ROUTER_URL:-}
if [ -z "$router" ]; then
    need PREFILL_IP "the prefill machine's address, or ROUTER_URL"
    need DECODE_IP "the decode machine's address, or ROUTER_URL"
    port=${ROUTER_PORT:-8000}
    side=${PREFILL_KV_HOST:-$PREFILL_IP}:${PREFILL_SIDE_CHANNEL_PORT:-5600}
    "$PYTHON" - "$port" <<'PYTHON' || fail "ROUTER_PORT: $port can't be used: scripts/cleanup.sh proxy, or another, or ROUTER_URL"
import socket
import sys

with socket.socket() as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", int(sys.argv[1])))
    except (OSError, OverflowError, ValueError):
        sys.exit(1)
PYTHON
    mkdir -p "$RUN_DIR"
    log=$RUN_DIR/router.log
    marker
    pid=
    trap '[ -z "$pid" ] || { kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; rm -f "$RUN_DIR/proxy"; }' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    "$PYTHON" -m kvferry.cli router --host 127.0.0.1 --port "$port" --mode "$mode" ${STORY_DIR:+--story-dir "$STORY_DIR"} \
        --prefill "http://$PREFILL_IP:${PREFILL_PORT:-8100},side_channel=$side,engine_id=${PREFILL_ENGINE_ID:-prefill-0},tp=${PREFILL_TP_SIZE:-1}" \
        --decode "http://$DECODE_IP:${DECODE_PORT:-8200},side_channel=$DECODE_IP:${DECODE_SIDE_CHANNEL_PORT:-5600},engine_id=decode-0,tp=${DECODE_TP_SIZE:-1}" \
        >"$log" 2>&1 &
    pid=$!
    mark proxy "$pid"
    unset KVFERRY_TREE
    router=http://127.0.0.1:$port
    why=$("$PYTHON" - "$router" "$pid" "$log" <<'PYTHON'
import json, sys, time, urllib.error, urllib.request

import psutil

url, pid, until, said = sys.argv[1], int(sys.argv[2]), time.monotonic() + 60, "no answer"


def runs():
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


while time.monotonic() < until:
    if not runs():
        with open(sys.argv[3]) as log:
            print("it ended:", (log.read().strip().splitlines() or ["without a word"])[-1])
        sys.exit(1)
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            sys.exit(0)
    except urllib.error.HTTPError as error:
        said = "; ".join(f"{e['role']} {e['url']}: {e['reason']}" for e in json.load(error)["engines"] if not e["ready"])
    except OSError as error:
        said = str(error)
    time.sleep(0.5)
print(f"not within 60 s: {said}")
sys.exit(1)
PYTHON
    ) || fail "the router is not ready: $why; its log: $log"
fi

"$PYTHON" -m kvferry.cli bench sweep --router "$router" --modes "$mode" --model "$MODEL" \
    --qps "${QPS_LIST:-1,2,4,8}" --input-lens "${INPUT_LENS:-1000,4000,8000,16000}" --output-lens "${OUTPUT_LENS:-128}" \
    --num "${NUM:-100}" --iterations "${ITERATIONS:-1}" --results "${RESULTS:-results}" \
    ${STORY_DIR:+--story-dir "$STORY_DIR"} "$@"
