"""The tier `nixl-gpu` between two processes, each with a GPU of its own where there are two, with NIXL and CUDA."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gpu_tier_peer import BLOCK_BYTES, LAYOUT, Engine

from openinfer_kv_cache import Digest, TierFailure, Transfer, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, content, ended
from openinfer_nixl.agent import NixlAgent, Piece

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        all(find_spec(name) is None for name in ("nixl", "nixl_cu13", "nixl_cu12")), reason="NIXL is not installed"
    ),
]

NUM_BLOCKS = 100  # more than a batch


@contextmanager
def peer() -> Generator["tuple[subprocess.Popen[str], str]"]:
    """A process that has saved blocks, on the last GPU, and its address."""
    import cupy

    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    last = shown[-1] if shown[-1] else str(cupy.cuda.runtime.getDeviceCount() - 1)
    script = Path(__file__).with_name("gpu_tier_peer.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(NUM_BLOCKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": last},
    ) as process:
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.startswith("{"))  # NIXL prints what it does
            yield process, f"127.0.0.1:{json.loads(next(lines))['port']}"
        finally:
            process.kill()


class Overwriting(NixlAgent):
    """What it reads is overwritten before it is compared: as by an owner that has given the place to another block."""

    engine: Engine | None = None

    def read(self, peer: str, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        super().read(peer, pieces, timeout_s=timeout_s)
        assert self.engine is not None
        self.engine.overwrite(pieces[0].local + 3 * BLOCK_BYTES + 17, 1)


def load(engine: Engine, digests: Sequence[Digest], *, timeout_s: float = 60.0) -> Transfer:
    """Backwards into the pool."""
    asking = threading.Thread(target=engine.tier.look_up, args=(digests,))  # as an engine: one that has no GPU yet
    asking.start()
    asking.join(60)
    hit = engine.tier.find(digests)
    assert list(hit.digests) == list(digests)
    blocks: list[Any] = [*engine.pool.blocks[: len(digests)]][::-1]
    transfer = engine.tier.load(hit, blocks, timeout_s=timeout_s)
    ended(transfer)
    return transfer


def test_blocks_go_from_one_gpus_memory_to_the_others_and_their_sums_fit(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, address = stack.enter_context(peer())
        engine = Engine(tmp_path, NUM_BLOCKS, peers=address)
        stack.callback(engine.tier.close)
        digests = chain(0, NUM_BLOCKS)
        for _ in range(2):
            assert load(engine, digests).poll() is TransferState.COMPLETED
        for place, digest in enumerate(reversed(digests)):
            assert engine.held(place) == content(digest, LAYOUT)
        counters = engine.tier.counters()[0]
        assert counters.loaded_blocks == 2 * NUM_BLOCKS
        assert counters.corrupt_blocks == 0


def test_own_blocks_come_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, NUM_BLOCKS)
    engine.save(1, NUM_BLOCKS)
    digests = chain(1, NUM_BLOCKS)
    assert load(engine, digests).poll() is TransferState.COMPLETED
    assert [engine.held(place) for place in range(3)] == [content(each, LAYOUT) for each in digests[:-4:-1]]
    engine.tier.close()


def test_a_byte_that_has_changed_on_its_way_is_no_block(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, address = stack.enter_context(peer())
        engine = Engine(tmp_path, NUM_BLOCKS, peers=address, make_agent=Overwriting)
        Overwriting.engine = engine
        stack.callback(engine.tier.close)
        transfer = load(engine, chain(0, 8))
        assert transfer.failure is TierFailure.CORRUPT
        assert transfer.completed_blocks == 3


def test_a_peer_that_is_killed_is_a_miss(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process, address = stack.enter_context(peer())
        engine = Engine(tmp_path, NUM_BLOCKS, peers=address)
        stack.callback(engine.tier.close)
        digests = chain(0, 8)
        assert load(engine, digests).poll() is TransferState.COMPLETED
        engine.tier.look_up(chain(0, 16))
        process.kill()
        process.wait()
        hit = engine.tier.find(chain(0, 16))
        transfer = engine.tier.load(hit, engine.pool.blocks[:16], timeout_s=60.0)
        assert ended(transfer) is TransferState.PARTIAL
        assert transfer.failure is TierFailure.MISSING
        engine.save(1, 4)  # its own memory is used as before
        assert load(engine, chain(1, 4)).poll() is TransferState.COMPLETED
