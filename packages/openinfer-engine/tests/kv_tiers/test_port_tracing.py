"""Loads and saves of a port, as a trace has them."""

from pathlib import Path
from typing import cast

import numpy as np

from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.tracing.trace import Trace
from openinfer_kv_cache import Digest, KvDtype, KvLayout, KvSpec, KvTier, PagedGroup, PagedTensor
from openinfer_kv_offload import HostTier, HostTierOptions

TENSOR = PagedTensor(name="k", num_heads=1, head_dim=8, dtype=KvDtype.FLOAT32)
SPEC = KvSpec(model_tag="m", paged=(PagedGroup(name="attention", num_layers=2, tensors=(TENSOR,)),))
LAYOUT = KvLayout.from_spec(SPEC, block_size_tokens=4)
DIGESTS = [Digest(bytes([number]) * 16) for number in range(3)]


def test_a_load_and_a_save_are_spans_from_their_begin_until_they_are_seen_to_be_over(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    pool = np.zeros((8, LAYOUT.block_bytes), np.uint8)
    tier = HostTier(LAYOUT, HostTierOptions(capacity_bytes=8 * 2 * LAYOUT.block_bytes))
    blocks = [memoryview(block) for block in pool]
    port = PoolTierPort(cast("KvTier", tier), blocks, load_timeout_s=10.0, tracer=trace)
    try:
        save = port.save(DIGESTS, [0, 1, 2])
        assert save is not None
        while not save.is_over():
            save.wait(1.0)
        load = port.load(port.find(DIGESTS), [3, 4, 5])
        assert load is not None
        assert spans_of(trace) == [("save", 3, 3)]
        while not load.is_over():
            load.wait(1.0)
        assert load.is_over()
        assert spans_of(trace) == [("save", 3, 3), ("load", 3, 3)]
    finally:
        port.close()


def spans_of(trace: Trace) -> list[tuple[str, int, int]]:
    spans = [event for event in trace.events() if event["ph"] == "X"]
    return [(span["name"], span["args"]["blocks"], span["args"]["completed"]) for span in spans]
