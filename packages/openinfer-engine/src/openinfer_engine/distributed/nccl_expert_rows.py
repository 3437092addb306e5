"""`open_expert_rows`: ranks of one machine open each other's memory, where they take rows for their experts."""

import logging

import numpy as np

from openinfer_kernels import KernelsError
from openinfer_kernels.cuda.comm.expert_rows import HANDLE_BYTES, ExpertRows
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.comm.peer_buffers import MAX_RANKS
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy

logger = logging.getLogger("openinfer.engine")


def open_expert_rows(group: NcclGroup, device: Device, *, rank: int, size: int) -> ExpertRows | None:
    """What brings rows to other ranks' experts, if all GPUs reach each other's memory; called on every rank."""
    if size > MAX_RANKS:
        return None
    with cupy.cuda.Stream(non_blocking=True) as stream:
        made = ExpertRows(device, rank=rank, size=size)
        handles = cupy.empty((size, HANDLE_BYTES), np.uint8)
        group.all_gather(cupy.asarray(np.frombuffer(made.handle, np.uint8)), handles)
        refusals = np.zeros(1, np.int32)
        try:
            made.connect([bytes(handle) for handle in cupy.asnumpy(handles)])
        except KernelsError as error:
            logger.warning("rank %d: rows go to other ranks' experts through NCCL: %s", rank, error)
            refusals[0] = 1
        # All ranks use the kernels or none does, so one that cannot connect says so in a sum.
        all_refusals = cupy.asarray(refusals)
        group.all_reduce(all_refusals, all_refusals)
        is_possible = not cupy.asnumpy(all_refusals).any()
        stream.synchronize()
    if not is_possible:
        made.close()
    return made if is_possible else None
