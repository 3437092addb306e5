"""`open_expert_rows`: ranks of one process tell each other where they take rows for their experts."""

import logging

import numpy as np

from openinfer_kernels import ExpertChoice, KernelsError
from openinfer_kernels.cuda.comm.expert_rows import ExpertRows
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.comm.peer_buffers import MAX_RANKS
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy

logger = logging.getLogger("openinfer.engine")

_WARM_WIDTH = 64


def open_expert_rows(group: NcclGroup, device: Device, *, rank: int, size: int) -> ExpertRows | None:
    """What brings rows to other ranks' experts, if all GPUs reach each other's memory; called on every rank."""
    if size > MAX_RANKS:
        return None
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gpus = cupy.empty(size, np.int64)
        group.all_gather(cupy.asarray([device.index], np.int64), gpus)
        made, refusals = None, np.zeros(1, np.int32)
        try:
            made = ExpertRows(device, rank=rank, size=size, gpus=cupy.asnumpy(gpus).tolist())
        except KernelsError as error:
            logger.warning("rank %d: rows go to other ranks' experts through NCCL: %s", rank, error)
            refusals[0] = 1
        # All ranks use the kernels or none does, so one that cannot says so in a sum.
        all_refusals, addresses = cupy.asarray(refusals), cupy.empty((size, 2), np.int64)
        group.all_reduce(all_refusals, all_refusals)
        group.all_gather(cupy.asarray((0, 0) if made is None else made.addresses, np.int64), addresses)
        if made is not None and not cupy.asnumpy(all_refusals).any():
            made.connect([(rows, sums) for rows, sums in cupy.asnumpy(addresses).tolist()])
            _warm_up(made)
            stream.synchronize()
            return made
        stream.synchronize()
    if made is not None:
        made.close()
    return None


def _warm_up(made: ExpertRows) -> None:
    """Loads both kernels here, where no rank waits for another's launch: to load one may wait for the device."""
    row = cupy.zeros((1, _WARM_WIDTH), bfloat16)
    choice = ExpertChoice(ids=cupy.zeros((1, 1), np.int32), weights=cupy.zeros((1, 1), np.float32))
    _, ids, _, _ = made.dispatch(row, choice, shared=row, places=1, experts=1)
    made.combine(cupy.zeros((len(ids), _WARM_WIDTH), np.float32), ids, tokens=1, experts=1)
