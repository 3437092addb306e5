"""One attack from a process of its own.

    python -m openinfer_bench.hostile.attacker NAME HOST PORT COUNT CONCURRENCY SECONDS

Prints how often each outcome came, as JSON.
"""

import asyncio
import json
import sys

from openinfer_bench.hostile.attacks import run_attack


def main() -> int:
    """Attacks."""
    name, host, port, count, concurrency, seconds = sys.argv[1:]
    attack = run_attack(name, host, int(port), count=int(count), concurrency=int(concurrency), seconds=float(seconds))
    print(json.dumps(asyncio.run(attack)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
