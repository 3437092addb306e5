"""`openinfer bench kv-offload`: host time per KV block, and bandwidth of saves and loads of each tier, on a CPU."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from openinfer_core.provenance import provenance
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, KvTier, PagedGroup, PagedTensor, TransferState
from openinfer_kv_cache.testing.tier_cases import chain
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.host.options import HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.remote.tier import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.transfer.memory import block_views
from openinfer_kv_offload.transfer.queue import QueueOptions

OPENINFER_CONTRACT = 1

_ROUNDS = 20
_QUEUE = QueueOptions(num_threads=1)


def _layout(num_layers_times_heads: int, head_dim: int) -> KvLayout:
    k, v = (PagedTensor(name=name, num_heads=1, head_dim=head_dim, dtype=KvDtype.BFLOAT16) for name in "kv")
    group = PagedGroup(name="attention", num_layers=num_layers_times_heads, tensors=(k, v))
    return KvLayout.from_spec(KvSpec(model_tag="bench", paged=(group,)), block_size_tokens=16)


_SMALL = _layout(1, 64)
_LARGE = _layout(36 * 8, 128)


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tier."""

    bookkeeping_us: float
    """CPU time of find, pin and release for one block, in a chain of `chain_blocks`; the fastest round."""
    save_gb_s: float
    load_gb_s: float
    """10^9 bytes a second of the blocks of Qwen3-4B with checksums, one thread moving (on a server: eight connections);
    the fastest round."""


class OffloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `openinfer bench kv-offload --json` writes."""

    chain_blocks: int
    block_bytes: int
    moved_blocks: int
    tiers: dict[str, TierFigures]


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it."""
    parser = argparse.ArgumentParser(prog="openinfer bench kv-offload", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--chain-blocks", type=int, default=1024, metavar="N", help="blocks of the prefix that is looked up"
    )
    parser.add_argument("--moved-blocks", type=int, default=64, metavar="N", help="blocks of one transfer")
    parser.add_argument("--servers", action="store_true", help="also Valkey and SeaweedFS, started on this machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args(argv)
    report = measure(
        chain_blocks=arguments.chain_blocks, moved_blocks=arguments.moved_blocks, with_servers=arguments.servers
    )
    lines = [f"{'tier':>6} {'us/block':>9} {'save GB/s':>10} {'load GB/s':>10}"]
    lines += [
        f"{name:>6} {each.bookkeeping_us:>9.2f} {each.save_gb_s:>10.2f} {each.load_gb_s:>10.2f}"
        for name, each in report.tiers.items()
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json is not None:
        content = {**msgspec.to_builtins(provenance()), **msgspec.to_builtins(report)}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    return 0


def measure(*, chain_blocks: int, moved_blocks: int, with_servers: bool = False) -> OffloadReport:
    """Measures a host tier and a disk tier in a temporary folder, whose files the page cache holds.

    Args:
        chain_blocks: of the chain that is found, pinned and released; its blocks are small.
        moved_blocks: of Qwen3-4B, in one transfer.
        with_servers: also tiers on servers of this machine, which share its cores; see `testing.servers`.
    """
    with contextlib.ExitStack() as ending:
        scratch = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="openinfer-bench-kv-")))
        openers: dict[str, Callable[[KvLayout, int], KvTier]] = {
            "host": _open_host,
            "disk": lambda layout, capacity_bytes: _open_disk(layout, capacity_bytes, scratch),
        }
        if with_servers:
            openers |= ending.enter_context(_servers(scratch))
        tiers = {name: _figures(open_tier, chain_blocks, moved_blocks) for name, open_tier in openers.items()}
    return OffloadReport(
        chain_blocks=chain_blocks,
        block_bytes=_LARGE.block_bytes,
        moved_blocks=moved_blocks,
        tiers=tiers,
    )


def _figures(open_tier: Callable[[KvLayout, int], KvTier], chain_blocks: int, moved_blocks: int) -> TierFigures:
    bookkeeping_us = _bookkeeping_us(open_tier(_SMALL, _capacity_bytes(_SMALL, chain_blocks)), chain_blocks)
    save_gb_s, load_gb_s = _move(open_tier(_LARGE, _capacity_bytes(_LARGE, moved_blocks)), moved_blocks)
    return TierFigures(bookkeeping_us=bookkeeping_us, save_gb_s=save_gb_s, load_gb_s=load_gb_s)


def _capacity_bytes(layout: KvLayout, num_blocks: int) -> int:
    return num_blocks * (layout.block_bytes + 8192) * 2


def _open_host(layout: KvLayout, capacity_bytes: int) -> KvTier:
    return HostTier(layout, HostTierOptions(capacity_bytes=capacity_bytes, queue=_QUEUE))


def _open_disk(layout: KvLayout, capacity_bytes: int, scratch: Path) -> KvTier:
    folder = str(scratch / layout.digest)
    return DiskTier(layout, DiskTierOptions(folder=folder, budget_bytes=capacity_bytes, queue=_QUEUE))


@contextlib.contextmanager
def _servers(scratch: Path) -> Generator[dict[str, Callable[[KvLayout, int], KvTier]]]:
    """Starts them, and says how to open a tier on each."""
    from openinfer_kv_offload.remote.s3_store import S3Store
    from openinfer_kv_offload.remote.valkey_store import ValkeyStore
    from openinfer_kv_offload.testing.servers import S3_BUCKET, S3_ENVIRONMENT, S3Server, ValkeyServer

    folders = {name: scratch / name for name in ("valkey", "s3")}
    for folder in folders.values():
        folder.mkdir()
    os.environ.update(S3_ENVIRONMENT)

    def opener(connect: Callable[[], ObjectStore]) -> Callable[[KvLayout, int], KvTier]:
        def open_tier(layout: KvLayout, capacity_bytes: int) -> KvTier:
            options = RemoteTierOptions(budget_bytes=capacity_bytes, prefix=layout.digest, queue=_QUEUE)
            return RemoteTier(layout, connect(), options)

        return open_tier

    with ValkeyServer(folders["valkey"], max_memory="4gb") as valkey, S3Server(folders["s3"]) as s3:
        yield {
            "valkey": opener(lambda: ValkeyStore(valkey.url)),
            "s3": opener(lambda: S3Store(S3_BUCKET, endpoint=s3.endpoint)),
        }


def _bookkeeping_us(tier: KvTier, num_blocks: int) -> float:
    digests = chain(0, num_blocks)
    _require_completed(
        tier.save(digests, block_views(np.zeros((num_blocks, tier.layout.block_bytes), np.uint8), tier.layout)).wait()
    )
    rounds_s: list[float] = []
    for _ in range(_ROUNDS):
        begin_s = time.thread_time()
        hit = tier.find(digests)
        hit.close()
        rounds_s.append(time.thread_time() - begin_s)
        assert len(hit.digests) == num_blocks  # noqa: S101 -- else nothing was measured
    tier.close()
    return min(rounds_s) / num_blocks * 1e6


def _move(tier: KvTier, num_blocks: int) -> tuple[float, float]:
    """Save and load in GB/s; the second round of saving is of new blocks into memory that exists."""
    pool = np.random.default_rng(0).integers(0, 256, (num_blocks, tier.layout.block_bytes), np.uint8)
    blocks = block_views(pool, tier.layout)
    saves_s: list[float] = []
    loads_s: list[float] = []
    for seed in range(4):
        digests = chain(seed, num_blocks)
        begin_s = time.perf_counter()
        _require_completed(tier.save(digests, blocks).wait())
        saves_s.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        _require_completed(tier.load(tier.find(digests), blocks).wait())
        loads_s.append(time.perf_counter() - begin_s)
    tier.close()
    return pool.nbytes / min(saves_s) / 1e9, pool.nbytes / min(loads_s) / 1e9


def _require_completed(state: TransferState) -> None:
    assert state is TransferState.COMPLETED, f"a transfer of the bench ended {state}"  # noqa: S101
