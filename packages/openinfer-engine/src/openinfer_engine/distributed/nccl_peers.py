"""`connect_peers`: ranks of one machine open each other's memory, all of them or none."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from openinfer_kernels import KernelsError
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.comm.peer_buffers import MAX_RANKS
from openinfer_kernels.cuda.common.libraries import cupy

logger = logging.getLogger("openinfer.engine")


class PeerKernels(Protocol):
    """A rank's end of kernels that write into the other ranks' memory."""

    @property
    def handle(self) -> bytes: ...

    def connect(self, handles: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=PeerKernels)


def connect_peers(
    group: NcclGroup, make: Callable[[], _Made], *, handle_bytes: int, rank: int, size: int, otherwise: str
) -> _Made | None:
    """What `make` makes of this rank, connected to all others, if all ranks have memory and reach each other's.

    Args:
        group: of the ranks, each of which calls this.
        make: makes this rank's end.
        handle_bytes: of a handle of what it makes.
        rank: this rank.
        size: of the group.
        otherwise: what is done without it, for the log.
    """
    if size > MAX_RANKS:
        return None
    made: _Made | None = None
    with cupy.cuda.Stream(non_blocking=True) as stream:
        refusals = np.zeros(1, np.int32)
        handle = bytes(handle_bytes)  # what the others read of a rank that has none: they would wait for it for ever
        try:
            made = make()
            handle = made.handle
        except (MemoryError, cupy.cuda.runtime.CUDARuntimeError) as error:
            logger.warning("rank %d has no memory that others can open: %s: %s", rank, otherwise, error)
            refusals[0] = 1
        handles = cupy.empty((size, handle_bytes), np.uint8)
        group.all_gather(cupy.asarray(np.frombuffer(handle, np.uint8)), handles)
        all_handles = [bytes(each) for each in cupy.asnumpy(handles)]
        if made is not None and all(map(any, all_handles)):
            try:
                made.connect(all_handles)
            except KernelsError as error:
                logger.warning("rank %d: %s: %s", rank, otherwise, error)
                refusals[0] = 1
        # All ranks use the kernels or none does, so one that cannot connect says so in a sum.
        all_refusals = cupy.asarray(refusals)
        group.all_reduce(all_refusals, all_refusals)
        is_possible = not cupy.asnumpy(all_refusals).any()
        stream.synchronize()
    if made is not None and not is_possible:
        made.close()
    return made if is_possible else None
