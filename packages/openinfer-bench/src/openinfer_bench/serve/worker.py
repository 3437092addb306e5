"""A client process: `python -m openinfer_bench.serve.worker`, an `Assignment` on stdin, its outcomes on stdout."""

import asyncio
import contextlib
import gc
import sys
import time

import msgspec

from openinfer_bench.serve.client import Client, Connect, connect_by_tcp
from openinfer_bench.serve.messages import Assignment, Job, Outcome


async def work(assignment: Assignment, *, connect: Connect = connect_by_tcp) -> list[Outcome]:
    """Runs all jobs: those with a time at their time, the others as places become free."""
    client = Client(assignment.target, connect=connect)
    begin_s = time.perf_counter() + max(0.0, assignment.begin_at_s - time.time())
    await asyncio.sleep(begin_s - time.perf_counter())
    places = asyncio.Semaphore(assignment.places)

    async def run(job: Job) -> Outcome:
        if job.at_s is not None:
            await asyncio.sleep(max(0.0, begin_s + job.at_s - time.perf_counter()))
            return await client.run(job)
        async with places:
            return await client.run(job)

    try:
        return await asyncio.gather(*map(run, assignment.jobs))
    finally:
        client.close()


def main() -> int:
    """Reads, works, answers."""
    assignment = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Assignment)
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    gc.freeze()
    gc.disable()  # a pause of the collector would be counted as the server's
    with asyncio.Runner(loop_factory=factory) as runner:
        outcomes = runner.run(work(assignment))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
