"""One attack from a process of its own.

    python -m openinfer_bench.hostile.attacker NAME http[s]://HOST:PORT KEY CONCURRENCY

Prints an empty line when it begins, ends on SIGTERM, and prints how often each outcome came, as JSON.
"""

import asyncio
import signal
import sys

import msgspec

from openinfer_bench.hostile.attacks import Counts, run_attack
from openinfer_bench.http_client import Address
from openinfer_core.process.descriptors import raise_descriptor_limit


def main() -> int:
    """Attacks."""
    raise_descriptor_limit()
    sys.stdout.write(msgspec.json.encode(asyncio.run(_attack(*sys.argv[1:]))).decode())
    return 0


async def _attack(name: str, url: str, key: str, concurrency: str) -> Counts:
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    address = Address.of(url)
    print(flush=True)  # it has begun
    return await run_attack(name, address, told_to_end.wait(), key=key, concurrency=int(concurrency))


if __name__ == "__main__":
    raise SystemExit(main())
