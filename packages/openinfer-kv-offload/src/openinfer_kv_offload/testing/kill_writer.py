"""Kills a process while it writes to a store, opens the store, and compares every byte; again and again.

A kill loses no page that the kernel has, so what the writer was told had completed must be found again; what else
is found must be right.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from openinfer_kv_cache import KvLayout
from openinfer_kv_cache.testing.tier_cases import chain, content, empty, ended, filled, kit_layout
from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.format.record import record_bytes

_BLOCK_BYTES = 2**20
_IN_FLIGHT = 16
_SEED = 6


class KillReport(msgspec.Struct, kw_only=True):
    """What the kills left behind."""

    kills: int = 0
    completed_blocks: int = 0
    """Reported as completed to a writer that was killed later."""
    found_blocks: int = 0
    """Loaded after the last kill and compared byte by byte."""
    lost_blocks: int = 0
    """Reported as completed and not found."""
    wrong_blocks: int = 0
    torn_ends: int = 0
    """Kills that left part of a record at the end of a segment."""
    corrupt_blocks: int = 0
    """Whole in size, and dropped by their checksum."""


def kill_writers(folder: Path, *, kills: int) -> KillReport:
    """Kills `kills` writers of one store in the empty `folder`, one after the other."""
    report = KillReport()
    rng = random.Random(_SEED)  # noqa: S311 -- when to kill
    layout = _layout()
    first = 0
    for _ in range(kills):
        completed = _run_and_kill(folder, first, after_blocks=rng.randrange(1, 40))
        report.kills += 1
        report.completed_blocks += len(completed)
        report.torn_ends += any(path.stat().st_size % record_bytes(_BLOCK_BYTES) for path in folder.glob("*.kv"))
        _check_store(folder, layout, completed, report)
        first = max(completed) + 2 * _IN_FLIGHT
    report.found_blocks = _check_store(folder, layout, [], report, everything_before=first)
    return report


def _run_and_kill(folder: Path, first: int, *, after_blocks: int) -> list[int]:
    """Indices of the blocks that completed before the kill, as far as the writer could say so."""
    command = [sys.executable, "-m", __spec__.name, "--folder", str(folder), "--first", str(first)]
    completed: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: S603
        assert writer.stdout is not None
        completed += [int(writer.stdout.readline()) for _ in range(after_blocks)]
        writer.kill()
        completed += [int(line) for line in writer.stdout.read().splitlines() if line]
    return completed


def _check_store(
    folder: Path, layout: KvLayout, completed: Sequence[int], report: KillReport, *, everything_before: int = 0
) -> int:
    """Opens the store as the next writer, compares, and returns how many blocks it gave back."""
    tier = _open(folder, layout)
    found = 0
    for index in completed or range(everything_before):
        (digest,) = chain(index, 1)
        hit = tier.find([digest])
        blocks = empty(len(hit.digests), layout)
        transfer = tier.load(hit, blocks)
        ended(transfer)
        found += transfer.completed_blocks
        report.wrong_blocks += transfer.completed_blocks and bytes(blocks[0]) != content(digest, layout)
    report.lost_blocks += len(completed) - found if completed else 0
    report.corrupt_blocks += tier.counters()[0].corrupt_blocks
    tier.close()
    return found


def _write_for_ever(folder: Path, first: int) -> None:
    layout = _layout()
    tier = _open(folder, layout)
    index = first
    while True:
        batch = range(index, index + _IN_FLIGHT)
        transfers = [tier.save(chain(each, 1), filled(chain(each, 1), layout)) for each in batch]
        for each, transfer in zip(batch, transfers, strict=True):
            ended(transfer)
            if transfer.completed_blocks:
                sys.stdout.write(f"{each}\n")
                sys.stdout.flush()
        index += _IN_FLIGHT


def _layout() -> KvLayout:
    return kit_layout(head_dim=_BLOCK_BYTES)


def _open(folder: Path, layout: KvLayout) -> DiskTier:
    return DiskTier(layout, DiskTierOptions(folder=str(folder), budget_bytes=4 * 2**30, segment_bytes=32 * 2**20))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write to a KV store until killed; `soak` starts and kills it.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True, help="index of the first block")
    arguments = parser.parse_args(argv)
    _write_for_ever(arguments.folder, arguments.first)


if __name__ == "__main__":
    main()
