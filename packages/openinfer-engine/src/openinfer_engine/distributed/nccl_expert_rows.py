"""`open_expert_rows`: ranks of one machine open each other's memory, where they take rows for their experts."""

from functools import partial

from openinfer_engine.distributed.nccl_peers import connect_peers
from openinfer_kernels.cuda.comm.expert_rows import HANDLE_BYTES, ExpertRows
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.common.device import Device


def open_expert_rows(group: NcclGroup, device: Device, *, rank: int, size: int) -> ExpertRows | None:
    """What brings rows to other ranks' experts, if all GPUs reach each other's memory; called on every rank."""
    make = partial(ExpertRows, device, rank=rank, size=size)
    otherwise = "rows go to other ranks' experts through NCCL"
    return connect_peers(group, make, handle_bytes=HANDLE_BYTES, rank=rank, size=size, otherwise=otherwise)
