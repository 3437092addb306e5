"""Operators of drafters on a GPU against NumPy: hidden states, columns, ids, and attention from a first key on.

python3 tools/device/draft_operators.py
compute-sanitizer --tool memcheck python3 tools/device/draft_operators.py --steps 4
"""

import argparse
import sys
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402

from openinfer_kernels import PagedCache  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kernels.cuda.batch_invariant import BatchInvariantCudaOps  # noqa: E402
from openinfer_kernels.testing.drafting import check_drafting  # noqa: E402
from openinfer_kernels.testing.paged import make_paged_case  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    ops = CudaOps()
    print(f"hidden states of {check_drafting(ops, steps=given.steps)} tokens: equal", flush=True)
    for operators in (ops, BatchInvariantCudaOps(ops.device)):
        for head_dim in (32, 64, 128, 256):
            print(f"first_key, heads of {head_dim}: {first_key(operators, head_dim):.4f} off", flush=True)
    return 0


def first_key(ops: Any, head_dim: int) -> float:
    """Largest difference of attention from key 1 on, where key 0 is NaN; raises where it is too large."""
    rng = np.random.default_rng(head_dim)
    rows = [(context, 1) for context in (2, 3, 16, 17, 33, 700, 1500)]
    case = make_paged_case(rng, rows, num_kv_heads=2, head_dim=head_dim, block_tokens=16)
    q = rng.normal(size=(case.num_tokens, 8, head_dim)).astype(np.float32)
    expected = CpuOps.paged_attention(q, case.cache(1), batch=case.batch, scale=head_dim**-0.5, first_key=1)
    data = case.kv_cache.copy()
    data[case.batch.block_tables[0][:, 0], :, :, :, 0] = np.nan
    names = ("positions", "query_starts", "context_lens")
    arrays: dict[str, Any] = {name: ops.upload(getattr(case.batch, name)) for name in names}
    arrays |= {name: tuple(map(ops.upload, getattr(case.batch, name))) for name in ("block_tables", "cache_slots")}
    batch = type(case.batch)(**arrays, max_query_tokens=1, max_context_tokens=1500, block_tokens=16)
    cache = PagedCache(data=ops.upload_weight(data), layer=1)
    found = ops.paged_attention(ops.upload_weight(q), cache, batch=batch, scale=head_dim**-0.5, first_key=1)
    differences = np.abs(np.asarray(ops.download(found), np.float32) - expected)
    assert differences.max() < 0.03, differences.max(axis=1)
    return float(differences.max())


if __name__ == "__main__":
    sys.exit(main())
