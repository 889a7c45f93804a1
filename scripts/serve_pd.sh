#!/bin/sh
# One engine of a pair, with kvferry's connector: run it on the prefill machine and on the decode machine.
#
#   PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 ROLE=prefill MODE=push MODEL=/models/m scripts/serve_pd.sh
#   PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 ROLE=decode  MODE=push MODEL=/models/m scripts/serve_pd.sh
#
#   PREFILL_IP, DECODE_IP  addresses at which the two machines reach each other
#   ROLE                   prefill (port 8100) or decode (port 8200); side channel on port 5600
#   MODE                   pull or push, the same on both machines (default: push)
#   MODEL                  folder or name of the model; SERVED_NAME: its name for clients (default: MODEL)
#   TP_SIZE                tensor-parallel size of this engine (default: 1)
#   STORY_DIR              folder for transfer stories (default: none)
#   PYTHON                 interpreter that has vLLM and kvferry (default: .venv/bin/python if there, else python3)
#   SIDE_CHANNEL_PORT      (default: 5600) and PORT, where 8100 or 8200 is taken
# Further arguments go to vLLM. Stop it with Ctrl-C, or scripts/cleanup.sh server.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/pd_common.sh"

need PREFILL_IP "the prefill machine's address"
need DECODE_IP "the decode machine's address"
need MODEL "folder or name of the model"
mode=${MODE:-push}
one_of MODE "$mode" pull push
role=${ROLE:-}
one_of ROLE "$role" prefill decode
side=${SIDE_CHANNEL_PORT:-5600}

if [ "$role" = prefill ]; then
    host=$PREFILL_IP port=${PORT:-8100} kv_role=kv_producer peer=
else
    host=$DECODE_IP port=${PORT:-8200} kv_role=kv_consumer peer=$PREFILL_IP:${PREFILL_SIDE_CHANNEL_PORT:-5600}
fi
config=$("$PYTHON" - "$role" "$kv_role" "$mode" "$host" "$side" "$peer" "${STORY_DIR:-}" <<'PYTHON'
import json
import sys

role, kv_role, mode, host, side, peer, story_dir = sys.argv[1:]
if not side.isdecimal():
    sys.exit(f"serve_pd.sh: error: SIDE_CHANNEL_PORT: {side!r} is not a port number")
extra = {"mode": mode, "side_channel_host": host, "side_channel_port": int(side)}
extra |= {"peers": [peer]} if peer else {}
extra |= {"story_dir": story_dir} if story_dir else {}
facts = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.connector", "kv_role": kv_role}
print(json.dumps({**facts, "engine_id": f"{role}-0", "kv_connector_extra_config": extra}))
PYTHON
)

marker
mark "server-$role" $$
# shellcheck disable=SC2086 # several words, or a test's stand-in
exec ${KVFERRY_ENGINE_COMMAND:-$PYTHON -m vllm.entrypoints.openai.api_server} --host 0.0.0.0 --port "$port" \
    --model "$MODEL" --served-model-name "${SERVED_NAME:-$MODEL}" --tensor-parallel-size "${TP_SIZE:-1}" \
    --no-enable-prefix-caching --max-num-seqs 8 --max-model-len "${MAX_MODEL_LEN:-32768}" \
    --middleware kvferry.connector.middleware.CheckTransferParams --kv-transfer-config "$config" "$@"
