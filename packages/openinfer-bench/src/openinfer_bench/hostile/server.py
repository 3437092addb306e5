"""The benchmark's server process: the real frontend before a simulated engine in a process of its own.

    python -m openinfer_bench.hostile.server MODEL_DIR

Prints its URL when it serves; ends on SIGTERM.
"""

import sys
from pathlib import Path

from openinfer_bench.hostile.model import NUM_TOKEN_IDS
from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server.options import ServerOptions
from openinfer_server.server import run

ENGINE = SimulatedOptions(
    ttft_s=0.02, tpot_s=0.01, num_token_ids=NUM_TOKEN_IDS, rows_per_step=256, max_waiting=64, max_model_tokens=65_536
)
SERVER = ServerOptions(port=0, head_timeout_s=2.0, max_connections=512)


def main() -> int:
    """Serves until SIGTERM."""
    return run(spawn_simulated(ENGINE), Path(sys.argv[1]), SERVER, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
