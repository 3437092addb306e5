"""GPUs by name, for `openinfer plan --gpu`: what a model would take of a card that is not here."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from openinfer_core import InvalidRequest, Refused
from openinfer_engine.cuda.planned_gpu import PlannedGpu
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import WeightSource
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import ForeignMemory, Ops

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class NamedGpu:
    """Implements `openinfer_engine.cuda.planned_gpu.Gpu` for an idle card."""

    name: str
    architecture: str
    memory_gib: float
    """Of all its memory, what CUDA reports as the device's total: less than on the box, and rounded down."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * _GIB)

    def used_bytes(self) -> int:
        return 0


NAMED_GPUS: Mapping[str, NamedGpu] = {
    "a10g-24g": NamedGpu("NVIDIA A10G", "sm_86", 21.9),
    "a100-40g": NamedGpu("NVIDIA A100 40GB", "sm_80", 39.3),
    "a100-80g": NamedGpu("NVIDIA A100 80GB", "sm_80", 79.1),
    "a6000-48g": NamedGpu("NVIDIA RTX A6000", "sm_86", 47.3),
    "rtx3090-24g": NamedGpu("NVIDIA GeForce RTX 3090", "sm_86", 23.5),
    "rtx4090-24g": NamedGpu("NVIDIA GeForce RTX 4090", "sm_89", 23.5),
    "rtx5090-32g": NamedGpu("NVIDIA GeForce RTX 5090", "sm_120", 31.3),
    "rtxpro6000-96g": NamedGpu("NVIDIA RTX PRO 6000 Blackwell", "sm_120", 94.9),
    "l4-24g": NamedGpu("NVIDIA L4", "sm_89", 21.9),
    "l40s-48g": NamedGpu("NVIDIA L40S", "sm_89", 44.3),
    "h20-96g": NamedGpu("NVIDIA H20", "sm_90a", 95.0),
    "h100-80g": NamedGpu("NVIDIA H100 80GB HBM3", "sm_90a", 79.1),
    "h100-94g": NamedGpu("NVIDIA H100 NVL", "sm_90a", 93.0),
    "gh200-96g": NamedGpu("NVIDIA GH200 96GB", "sm_90a", 94.5),
    "h200-141g": NamedGpu("NVIDIA H200", "sm_90a", 139.7),
    "b200-180g": NamedGpu("NVIDIA B200", "sm_100", 178.3),
}
"""By memory in units of 10^9 bytes, as the maker sells it. Only those for whose architecture there are kernels."""


def named_gpu(name: str) -> NamedGpu:
    """Raises `InvalidRequest`: there is no such name."""
    gpu = NAMED_GPUS.get(name.lower())
    if gpu is None:
        raise InvalidRequest(f"--gpu {name[:64]!r} is not known; known are {', '.join(NAMED_GPUS)}", field="gpu")
    return gpu


class NamedGpuBackend(PlannedGpu):
    """Implements `openinfer_engine.backends.Backend` as far as a plan goes; what needs the card raises `Refused`."""

    def enter_thread(self) -> None:
        raise self._absent()

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        raise self._absent()

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        raise self._absent()

    def thread_group(self, size: int) -> Sequence[Communicator]:
        raise self._absent()

    def make_ops(self) -> Ops:
        raise self._absent()

    def weights_memory(self) -> AbstractContextManager[None]:
        raise self._absent()

    def drafter_memory(self) -> AbstractContextManager[None]:
        raise self._absent()

    def adapters_memory(self) -> AbstractContextManager[None]:
        raise self._absent()

    def open_foreign(self, handle: bytes) -> ForeignMemory:
        raise self._absent()

    def dummy_weights(self, shapes: Mapping[str, Any], *, rank: int, size: int) -> WeightSource:
        raise self._absent()

    def make_worker(self, model: Any, *, mark: Callable[[str], None], **parts: Any) -> Worker:
        raise self._absent()

    def _absent(self) -> Refused:
        return Refused(f"{self._gpu.name} was named for a plan; nothing can be run on it")
