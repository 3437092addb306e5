"""A server with few descriptors, as a process: `python flooded_server.py MODEL_DIR LIMIT LOOP [CERTIFICATE]`.

Prints its URL when it serves; ends when its standard input does. A file is opened per line it is told, to be short of
descriptors: `open N`, and `close`.
"""

import asyncio
import logging
import os
import resource
import sys
import threading
from pathlib import Path

from openinfer_core.engine import EngineInfo
from openinfer_core.process.local import InProcessEngine
from openinfer_server import ServerOptions
from openinfer_server.options import EventLoop
from openinfer_server.server import event_loop_factory, serve
from openinfer_server.testing import ParrotLoop

INFO = EngineInfo(
    model="parrot",
    family="birds",
    max_model_tokens=100_000,
    num_token_ids=400,
    eos_token_ids=(),
    block_size_tokens=16,
    num_blocks=6400,
    max_num_seqs=64,
    max_waiting=4096,
)


def main(model_dir: str, limit: str, event_loop: EventLoop, certificate: str = "") -> int:
    logging.basicConfig(level=logging.ERROR)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    options = ServerOptions(port=0, tls_cert_file=certificate, max_buffered_bytes=2**30, max_request_kv_tokens=2**30)

    async def served() -> int:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def listen() -> None:
            files: list[int] = []
            for line in sys.stdin:
                if line.startswith("open"):
                    files += _open_all(int(line.split()[1]))
                else:
                    while files:
                        os.close(files.pop())
                say("done")
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=listen, daemon=True).start()
        handle = InProcessEngine(ParrotLoop(INFO))
        try:
            return await serve(handle, Path(model_dir), options, on_ready=say, stop=stop)
        finally:
            await handle.close()

    with asyncio.Runner(loop_factory=event_loop_factory(event_loop)) as runner:
        return runner.run(served())


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
