"""`HostCommunicator`: the collectives over NumPy arrays, each as one exchange; how the arrays meet is a subclass's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from openinfer_engine.distributed import host_collectives
from openinfer_engine.distributed.communicator import check_axis, check_pieces, check_root
from openinfer_engine.distributed.host_collectives import HostCollective
from openinfer_kernels import HostArray


class HostCommunicator(ABC):
    """A `Communicator` but for `abort` and `close`. Float16 is summed in float32, integers in their own dtype."""

    def __init__(self, rank: int, size: int, *, nodes: Sequence[int] | None = None) -> None:
        self._rank = rank
        self._size = size
        self._nodes = tuple(nodes or [0] * size)  # of each rank, where this one computes for others

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, array: HostArray) -> HostArray:
        return self._exchange(host_collectives.all_reduce(self._nodes), array)

    def all_gather(self, array: HostArray, *, axis: int) -> HostArray:
        check_axis(array, axis)
        return self._exchange(host_collectives.all_gather(axis), array)

    def reduce_scatter(self, array: HostArray, *, axis: int) -> HostArray:
        check_axis(array, axis, pieces=self._size)
        return self._exchange(host_collectives.reduce_scatter(axis, self._nodes), array)

    def all_to_all(self, array: HostArray) -> HostArray:
        check_pieces(array, self._size)
        return self._exchange(host_collectives.ALL_TO_ALL, array)

    def broadcast(self, array: HostArray, *, root: int) -> HostArray:
        check_root(root, self._size)
        return self._exchange(host_collectives.broadcast(root), array)

    def barrier(self) -> None:
        self._exchange(host_collectives.BARRIER, np.empty(0, np.uint8))

    @abstractmethod
    def _exchange(self, collective: HostCollective, array: HostArray) -> HostArray:
        """This rank's result of a collective to which it brings `array`, a new array.

        Raises:
            GroupBroken: another rank failed, left, or called something else; the group is broken then.
        """
