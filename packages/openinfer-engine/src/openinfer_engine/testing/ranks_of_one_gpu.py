"""Data-parallel ranks that share one GPU, for a machine that has no more: all but NCCL and NVLink is what several run.

A kernel that waits for the other rank's rows holds multiprocessors that this one's kernels need, so each launch has few
places; and no kernel may begin before the one ahead of it has ended, as it would hold all of them while that one waits.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from openinfer_engine import engine_plan
from openinfer_engine.backends import Backend
from openinfer_engine.cuda.backend import CudaBackend
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_kernels.cuda.comm import expert_rows
from openinfer_kernels.cuda.comm.expert_rows import ExpertRows
from openinfer_kernels.cuda.common import device as devices
from openinfer_kernels.cuda.common.device import Device

MOST_PLACES = 48
_NO_CAPABILITY = (99, 0)


class SharedGpu:
    """A communicator of one rank, of which the model's experts use the exchange of rows alone."""

    def __init__(self, host: Communicator, rows: ExpertRows) -> None:
        self._host, self._rows = host, rows
        self._has_met = False

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def size(self) -> int:
        return self._host.size

    @contextmanager
    def row_exchange(self) -> Generator[ExpertRows]:
        # What is loaded while a kernel waits for this rank would wait for that kernel.
        if not self._has_met:
            self._host.barrier()
            self._has_met = True
        yield self._rows

    def abort(self, error: BaseException) -> None:
        self._host.abort(error)
        self._rows.abort()

    def close(self) -> None:
        self._host.close()
        self._rows.close()


def thread_group(first: CudaBackend, others: Sequence[Backend]) -> list[Any]:
    device: Device = vars(first)["_device"]
    group = LocalGroup(1 + len(others))
    ends = [ExpertRows(device, rank=rank, size=1 + len(others), gpus=()) for rank in range(1 + len(others))]
    for each in ends:
        each.connect([end.addresses for end in ends])
    return [SharedGpu(host, end) for host, end in zip(group.communicators, ends, strict=True)]


def share_one_gpu(patch: Any) -> None:
    """Has all ranks on GPU 0, which data-parallel engines refuse so far; `patch` is pytest's `MonkeyPatch`."""

    def unchecked(*_: object) -> None:
        pass

    def on_one_gpu(size: int) -> Placement:
        return Placement(tuple(RankPlace(0, 0) for _ in range(size)))

    patch.setattr(Placement, "on_one_node", on_one_gpu)
    patch.setattr(CudaBackend, "thread_group", thread_group)
    patch.setattr(engine_plan, "check_data_parallel", unchecked)
    patch.setattr(expert_rows, "MOST_PLACES", MOST_PLACES)
    patch.setattr(devices, "_OVERLAP_CAPABILITY", _NO_CAPABILITY)
