"""Stand-in for an engine or the router: takes their command lines, answers /health, /v1/models and completions.

FAKE_DELAY_S       seconds until it listens
FAKE_DIES          it prints this and exits with 3 instead of listening, if its command line contains FAKE_DIES_WHEN
FAKE_STUBBORN=1    SIGTERM is ignored
FAKE_SHM           prefix of a shared-memory file that it maps and never removes
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if os.environ.get("FAKE_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
# A child in a session of its own: what a worker that outlives its parent looks like.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.environ.get("FAKE_DIES") and os.environ.get("FAKE_DIES_WHEN", "") in " ".join(sys.argv):
    print("loading weights", flush=True)
    print(os.environ["FAKE_DIES"], flush=True)
    print("Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
if os.environ.get("FAKE_SHM"):
    path = f"/dev/shm/{os.environ['FAKE_SHM']}-{os.getpid()}"
    with open(path, "w+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
time.sleep(float(os.environ.get("FAKE_DELAY_S", "0")))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"data": [{"id": "fake"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "hello"}]})


port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer.allow_reuse_address = True
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
