"""What all ranks are told about their weights, and where weights come from; no pickle."""

from typing import Protocol, TypeAlias, runtime_checkable

import msgspec


class WeightsSource(msgspec.Struct, frozen=True, array_like=True):
    """Where weights come from: a folder, shared memory, or, with neither, the random numbers of a dummy."""

    folder: str | None = None
    """Absolute, without links."""
    root: str | None = None
    """Below which every file of the folder lies, links resolved; None for the folder that the engine began with."""
    segments: tuple[str, ...] = ()
    """Names of shared memory, each the bytes of a safetensors file."""

    @property
    def described(self) -> str:
        if self.segments:
            return f"{len(self.segments)} segments of shared memory"
        return "random numbers" if self.folder is None else self.folder


class OpenWeights(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Opens weights and checks all that is known before a byte of them is read: names, shapes, dtypes."""

    source: WeightsSource


class DropWeights(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Gives the memory of the weights back; no step runs before they are loaded again."""


class DropKv(msgspec.Struct, frozen=True, array_like=True, tag="drop_kv"):
    """Gives the memory of the KV pool and of recurrent states back; what they hold is zero from then on."""


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load_weights"):
    """Reads what is open, which stays open."""


class CloseWeights(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Closes what is open; nothing to do if nothing is."""


WeightsOrder: TypeAlias = OpenWeights | DropWeights | DropKv | LoadWeights | CloseWeights


@runtime_checkable
class ObeysOrders(Protocol):
    """A worker, or all ranks as their runner has them, whose weights can change."""

    def obey(self, order: WeightsOrder) -> None:
        """Returns once it is done, after the steps launched before; on all ranks, for a runner.

        Raises:
            Refused: it cannot be; of `OpenWeights`, nothing has changed.
            GroupBroken: a rank is gone.
        """
        ...
