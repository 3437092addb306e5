"""A server with few descriptors, as a process: `python flooded_server.py MODEL_DIR LIMIT LOOP [CERTIFICATE]`.

Its engine is simulated, in a process of its own. Prints its URL when it serves; ends on SIGTERM. To be short of
descriptors, it opens files on a line `open N` on standard input, until N are left, and closes them on `close`.
"""

import logging
import os
import resource
import sys
import threading
from pathlib import Path

from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server import ServerOptions, run
from openinfer_server.options import EventLoop

ENGINE = SimulatedOptions(tpot_s=0.02, num_token_ids=400, max_model_tokens=16_000)


def main(model_dir: str, limit: str, event_loop: EventLoop, certificate: str = "") -> int:
    logging.basicConfig(level=logging.ERROR)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    options = ServerOptions(
        port=0,
        event_loop=event_loop,
        tls_cert_file=certificate,
        max_buffered_bytes=2**30,
        max_request_kv_tokens=2**30,
        drain_deadline_s=1,
    )
    threading.Thread(target=listen, daemon=True).start()
    return run(spawn_simulated(ENGINE), Path(model_dir), options, on_ready=say)


def listen() -> None:
    files: list[int] = []
    for line in sys.stdin:
        if line.startswith("open"):
            files += _open_all(int(line.split()[1]))
        else:
            while files:
                os.close(files.pop())
        say("done")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _open_all(left: int) -> list[int]:
    """Files until so many descriptors are left."""
    files: list[int] = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(left):
            os.close(files.pop())
    return files


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], EventLoop(sys.argv[3]), *sys.argv[4:]))
