"""Ranks that share one GPU, for a machine that has no more: all but NVLink is what ranks with a GPU each run.

Processes take turns on the GPU, so that a kernel which waits for another rank's is put aside for it, and a step takes
milliseconds for each exchange. NCCL refuses two ranks on one GPU of a node, so it is told that they are on several.
"""

import os
from typing import Any

from openinfer_engine.ranks.contract import RankLink, RankSpec
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_engine.ranks.process_host import ProcessRankHost

_NODE = "NCCL_HOSTID"


def share_one_gpu(patch: Any) -> None:
    """Has all ranks on GPU 0; `patch` is pytest's `MonkeyPatch`."""
    start_process = ProcessRankHost.start

    def start(host: ProcessRankHost, rank: int, spec: RankSpec) -> RankLink:
        here = os.environ[_NODE]
        os.environ[_NODE] = f"of-rank-{rank}"
        try:
            return start_process(host, rank, spec)
        finally:
            os.environ[_NODE] = here

    def on_one_gpu(size: int) -> Placement:
        return Placement(tuple(RankPlace(0, 0) for _ in range(size)))

    for name, value in {_NODE: "of-rank-0", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}.items():
        patch.setenv(name, value)
    patch.setattr(Placement, "on_one_node", on_one_gpu)
    patch.setattr(ProcessRankHost, "start", start)
