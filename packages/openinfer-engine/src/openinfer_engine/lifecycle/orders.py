"""What all ranks are told about their weights, and where weights come from; no pickle."""

from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from openinfer_core.control import DeviceTensor


class WeightsSource(msgspec.Struct, frozen=True, array_like=True):
    """Where weights come from: a folder, memory of another process, or, with neither, a dummy's random numbers."""

    folder: str | None = None
    """Absolute, without links."""
    root: str | None = None
    """Below which every file of the folder lies, links resolved; None for the folder that the engine began with."""
    segments: tuple[str, ...] = ()
    """Names of shared memory, each the bytes of a safetensors file."""
    tensors: tuple[DeviceTensor, ...] = ()
    """On a GPU."""
    drafter_folder: str | None = None
    """Of a drafter that has a folder of its own, absolute, without links; None: the one that the engine began with."""
    drafter_root: str | None = None
    """Below which every file of that folder lies, links resolved."""

    @property
    def is_gone(self) -> bool:
        """Whether they were given in memory, which is read once."""
        return bool(self.segments or self.tensors)

    @property
    def described(self) -> str:
        if self.segments:
            return f"{len(self.segments)} segments of shared memory"
        if self.tensors:
            return f"{len(self.tensors)} tensors on a GPU"
        return "random numbers" if self.folder is None else self.folder


class OpenWeights(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Opens weights and checks all that is known before a byte of them is read: names, shapes, dtypes."""

    source: WeightsSource


class KeepWeights(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Copies the weights into memory of the host, from where `TakeBack` brings them: where a device has its own."""


class DropWeights(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Lets go of the weights, what was kept of them, too; no step runs before they are loaded again."""


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="give_back"):
    """Gives the memory of KV and recurrent states back, and on a device all that a step needs; nothing to do twice."""


class TakeBack(msgspec.Struct, frozen=True, array_like=True, tag="take_back"):
    """Takes the memory of `GiveBack` again: KV and states are zero, and weights that were kept are there."""


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load_weights"):
    """Reads what is open, which stays open."""


class CloseWeights(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Closes what is open; nothing to do if nothing is."""


WeightsOrder: TypeAlias = OpenWeights | KeepWeights | DropWeights | GiveBack | TakeBack | LoadWeights | CloseWeights


@runtime_checkable
class ObeysOrders(Protocol):
    """A worker, or all ranks as their runner has them, whose weights can change."""

    def obey(self, order: WeightsOrder) -> None:
        """Returns once it is done, after the steps launched before; on all ranks, for a runner.

        Raises:
            Refused: it cannot be; of all but `LoadWeights`, nothing has changed on this rank.
            GroupBroken: a rank is gone.
        """
        ...
