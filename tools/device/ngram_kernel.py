"""Looked up drafts on a GPU against the CPU's operator: histories at random, many rows, lengths that are wrong.

    python3 tools/device/ngram_kernel.py [--steps N] [--rows N ...] [--width N] [--json FILE]
    compute-sanitizer --tool memcheck python3 tools/device/ngram_kernel.py --steps 3 --rows 1 7 --width 900

After each step drafts and the whole history are compared, bit for bit. Ends with 1 at the first difference.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402

from openinfer_kernels import NgramHistory, NgramMatch, NgramRule  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402

ARRAYS = ("ids", "known", "references", "drafts")
HOSTILE = (-(2**31), -1, 0, 2**31 - 1)


@dataclass(slots=True)
class Row:
    """Steps of one rule and so many rows."""

    match: str
    rows: int
    width: int
    steps: int
    drafts: int
    hostile: int
    kernel_us: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 31, 64, 200, 512])
    parser.add_argument("--width", type=int, default=4500)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ops, found = CudaOps(), []
    print("match     rows  width  steps  drafts  wrong lengths  us a call", flush=True)
    for rows in given.rows:
        for match in NgramMatch:
            row = compare(ops, match, rows=rows, width=given.width, steps=given.steps)
            found.append(row)
            print(
                f"{row.match:8}  {row.rows:4}  {row.width:5}  {row.steps:5}  {row.drafts:6}  {row.hostile:13}  "
                f"{row.kernel_us:9.1f}",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


def compare(ops: Any, match: NgramMatch, *, rows: int, width: int, steps: int) -> Row:
    """Raises `AssertionError` at the first difference."""
    rng = np.random.default_rng((rows, width))
    k = int(rng.integers(1, 9))
    rule = NgramRule(n_min=2, n_max=4, reference_n_max=32, match=match, max_tokens=width - 20)
    wanted = make_history(rng, slots=rows + 3, width=width, k=k)
    own = NgramHistory(**{name: ops.upload(getattr(wanted, name)) for name in ARRAYS})
    num_drafts = num_hostile = 0
    columns: list[Any] = []
    for _ in range(steps):
        slots = rng.permutation(rows + 3)[:rows].astype(np.int32)
        # Ids that go on as they did before, so that there are matches; and ids that no draft has.
        last_ids = rng.integers(0, 4, rows).astype(np.int32)
        accepted = rng.integers(0, (wanted.drafts[slots] >= 0).sum(axis=1) + 1)
        grown = np.where(rng.random(rows) < 0.1, rng.integers(0, k + 3, rows), 1 + accepted)
        lengths = (wanted.known[slots] + grown).astype(np.int32)
        is_hostile = rng.random(rows) < 0.05
        lengths[is_hostile] = rng.choice((*HOSTILE, width, width + 1), int(is_hostile.sum()))
        last_ids[rng.random(rows) < 0.02] = rng.choice(HOSTILE)
        columns = [ops.upload(each) for each in (slots, last_ids, lengths)]
        drafts = ops.download(ops.ngram_drafts(own, *columns, rule=rule))
        expected = CpuOps.ngram_drafts(wanted, slots, last_ids, lengths, rule=rule)
        np.testing.assert_array_equal(drafts, expected)
        for name in ARRAYS:
            np.testing.assert_array_equal(ops.download(getattr(own, name)), getattr(wanted, name), err_msg=name)
        num_drafts += int((expected >= 0).sum())
        num_hostile += int(is_hostile.sum())
    assert num_drafts, "no draft was ever found: the comparison says nothing"
    return Row(str(match), rows, width, steps, num_drafts, num_hostile, timed(ops, wanted, rule, rows=rows))


def make_history(rng: np.random.Generator, *, slots: int, width: int, k: int) -> NgramHistory:
    """Sequences of few different ids, and of many; every third slot with a reference."""
    known = rng.integers(1, width // 2, slots).astype(np.int32)
    references = ((np.arange(slots) % 3 == 0) * rng.integers(1, width // 4, slots)).astype(np.int32)
    kinds = rng.choice((2, 4, 50), slots)
    ids = (rng.integers(0, 2**30, (slots, width)) % kinds[:, None]).astype(np.int32)
    ids[np.arange(width) >= (known + references)[:, None]] = -1
    return NgramHistory(ids=ids, known=known, references=references, drafts=np.full((slots, k), -1, np.int32))


def timed(ops: Any, history: NgramHistory, rule: NgramRule, *, rows: int) -> float:
    """Microseconds of a call whose rows have all grown by one token: launches queued together, the best of five."""
    best = float("inf")
    for _ in range(5):
        own = NgramHistory(**{name: ops.upload(getattr(history, name)) for name in ARRAYS})
        known = history.known[:rows].clip(1, rule.max_tokens - 60)
        slots, last_ids = ops.upload(np.arange(rows, dtype=np.int32)), ops.upload(np.ones(rows, np.int32))
        lengths = [ops.upload((known + 1 + i).astype(np.int32)) for i in range(40)]
        ops.download(slots)
        began = time.perf_counter()
        for each in lengths:
            ops.ngram_drafts(own, slots, last_ids, each, rule=rule)
        ops.download(slots)
        best = min(best, time.perf_counter() - began)
    return best / 40 * 1e6


if __name__ == "__main__":
    sys.exit(main())
