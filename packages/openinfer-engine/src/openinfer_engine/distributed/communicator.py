"""How ranks exchange arrays: the `Communicator` protocol, and the one of a rank that is alone.

All ranks call the same collectives in the same order, with arrays of the same shape and dtype. No caller asks how
many ranks there are: `SoloCommunicator` answers every collective with what it was given.

Sums of floating-point numbers are accumulated in float32 in the order of ranks and rounded once to the dtype of
the array, so that every rank gets the same bits, in every run.
"""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from openinfer_kernels import Array


@runtime_checkable
class QueuesTogether(Protocol):
    """A `Communicator` that queues several collectives as one, which costs less than one after the other."""

    def together(self) -> AbstractContextManager[None]:
        """Within it every rank calls the same collectives; their results are there after it."""
        ...


class Communicator(Protocol):
    """One rank's end of a group.

    Every collective takes over its array: the caller must not read it afterwards, because an implementation may
    write the result into its memory. The result may share memory with the array, never with that of another rank.

    Every collective raises `GroupBroken` if another rank failed, left, or called something else.
    """

    @property
    def rank(self) -> int:
        """This rank, `0 <= rank < size`."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    def all_reduce(self, array: Array) -> Array:
        """The sum over all ranks, on every rank; any shape."""
        ...

    def all_gather(self, array: Array, *, axis: int) -> Array:
        """All ranks' arrays joined along `axis` in the order of ranks: `size` times as long there, on every rank."""
        ...

    def reduce_scatter(self, array: Array, *, axis: int) -> Array:
        """This rank's piece of the sum: `axis` is cut into `size` equal pieces.

        Raises:
            ValueError: the axis does not divide by the size.
        """
        ...

    def all_to_all(self, array: Array) -> Array:
        """Exchanges `array [size, ...]`: element `j` goes to rank `j`; element `i` of the result came from rank `i`.

        Raises:
            ValueError: the first axis is not `size` long.
        """
        ...

    def broadcast(self, array: Array, *, root: int) -> Array:
        """The array of rank `root`, on every rank; the others' arrays give shape and dtype only."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        ...

    def abort(self, error: BaseException) -> None:
        """Tells the group that this rank cannot go on because of `error`, so that none waits for it.

        Every rank's pending and later collectives raise `GroupBroken`. The first call counts. Never blocks.
        """
        ...

    def close(self) -> None:
        """Frees what it holds, when nothing that was captured with it is left. Idempotent."""
        ...


class SoloCommunicator:
    """The group of one rank; no collective copies anything."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, array: Array) -> Array:
        return array

    def all_gather(self, array: Array, *, axis: int) -> Array:
        check_axis(array, axis)
        return array

    def reduce_scatter(self, array: Array, *, axis: int) -> Array:
        check_axis(array, axis)
        return array

    def all_to_all(self, array: Array) -> Array:
        check_pieces(array, self.size)
        return array

    def broadcast(self, array: Array, *, root: int) -> Array:
        check_root(root, self.size)
        return array

    def barrier(self) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def gather_columns(communicator: Communicator, piece: Array, *, num_columns: int) -> Array:
    """`[n, num_columns]` of the ranks' pieces of columns, one rank after the other; columns beyond are padding.

    Rows follow each other without gaps, as operators ask for: those of an odd vocabulary are copied.
    """
    gathered = communicator.all_gather(piece, axis=1)
    return gathered if gathered.shape[1] == num_columns else gathered[:, :num_columns].copy()


def check_axis(array: Array, axis: int, *, pieces: int = 1) -> None:
    """Raises `ValueError` unless the array has the axis and it can be cut into so many equal pieces."""
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"an array of shape {array.shape} has no axis {axis}")
    if array.shape[axis] % pieces:
        raise ValueError(f"axis {axis} of shape {array.shape} cannot be cut into {pieces} equal pieces")


def check_pieces(array: Array, size: int) -> None:
    if array.ndim == 0 or array.shape[0] != size:
        raise ValueError(f"all_to_all among {size} ranks needs an array [{size}, ...], not one of shape {array.shape}")


def check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"there is no rank {root} among {size}")
