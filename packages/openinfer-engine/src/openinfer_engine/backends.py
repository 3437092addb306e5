"""`Backend`: what an engine asks of a kind of device before and while it loads a model.

A backend's modules are imported when it is chosen: a CPU engine needs no package of CUDA, and a GPU's start is not held
up by NumPy's operators.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from openinfer_core import Refused
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import DeviceKind, EngineOptions
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import Code, ForeignMemory, KernelsError, Ops, WeightFormat
from openinfer_kernels.driver import wake_driver
from openinfer_kernels.weights.gpu_kernels import Way
from openinfer_kv_cache import KvDtype, KvLayout


class Backend(Protocol):
    """One kind of device, for one engine."""

    @property
    def dtype(self) -> KvDtype:
        """What activations, weights and KV are stored in."""
        ...

    @property
    def architecture(self) -> str:
        """What kernels are made for: `cpu`, or a GPU's as compilers name it: `sm_90a`."""
        ...

    def enter_thread(self) -> None:
        """Makes its device that of the calling thread."""
        ...

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        """A group of ranks that are processes: the ticket that the others join it by, and rank 0's communicator."""
        ...

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        """Another rank's communicator.

        Raises:
            GroupBroken: rank 0 is gone.
        """
        ...

    def thread_group(self, size: int) -> Sequence[Communicator]:
        """A group of ranks that are threads of this process, which share its device; on GPUs there are none."""
        ...

    def check_layout(self, layout: KvLayout) -> None:
        """Raises `Refused` for blocks that its operators do not serve."""
        ...

    def check_low_bit(self, activations: Collection[Code], *, fp8_head: bool) -> None:
        """Raises `Refused` if it has no products with activations of these codes, or with a head in FP8."""
        ...

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        """Which implementation serves each phase, for `openinfer plan`; `provided` operators are another package's."""
        ...

    def way_of_weight(
        self, weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...], *, grouped: bool
    ) -> Way | None:
        """How it holds a quantised weight, `grouped` for `Ops.grouped_linear`; None: as it is stored."""
        ...

    def weight_kernels(self, products: Mapping[tuple[WeightFormat, Way], int]) -> dict[str, str]:
        """What multiplies quantised weights, of which there are so many of each format and way; for people."""
        ...

    @property
    def measured(self) -> dict[str, str]:
        """What was measured of some of them, and of what could stand in their place."""
        ...

    def workspaces(self, limits: WorkerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        """What steps need in addition to weights and KV, at most: purpose -> bytes on one rank's device."""
        ...

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        """What the KV cache may take by default.

        Raises:
            Refused: nothing is left.
        """
        ...

    def used_bytes(self) -> int:
        """Bytes of the device's memory in use by all processes; 0 where the device has none of its own."""
        ...

    def make_ops(self) -> Ops:
        """The operators, for one rank."""
        ...

    def weights_memory(self) -> AbstractContextManager[None]:
        """Within it, arrays that the calling thread makes are weights; the engine reads all of them within."""
        ...

    def drafter_memory(self) -> AbstractContextManager[None]:
        """Within it, arrays that the calling thread makes are a drafter's: after a sleep as they are at its end.

        Where a worker `keeps_drafter`, those of a second time take the places of the first ones.

        Raises:
            Refused: they cannot be kept for that.
            DeviceMemoryStateError: they are others than the first time, which are again what they were.
        """
        ...

    def adapters_memory(self) -> AbstractContextManager[None]:
        """Within it, arrays that the calling thread makes are adapter slots: like KV they are zero after a sleep."""
        ...

    def open_foreign(self, handle: bytes) -> ForeignMemory:
        """An allocation of another process on this GPU, by its CUDA IPC handle.

        Raises:
            Refused: there is no GPU, or no such memory.
        """
        ...

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        """Random weights, made where that is quickest."""
        ...

    def make_worker(
        self,
        model: Model,
        *,
        ops: Ops,
        num_blocks: int,
        span_blocks: int,
        layout: KvLayout,
        communicator: Communicator,
        limits: WorkerLimits,
        drafter: SharedDrafter | None,
        adapters: RankAdapters | None,
        mark: Callable[[str], None],
        tracer: Tracer,
    ) -> Worker:
        """The rank that runs a loaded model, warmed up; `mark` is told the name of each phase that has ended.

        Its pool has `span_blocks` more than the scheduler knows, after those: a drafter's.
        """
        ...


def open_backend(options: EngineOptions, *, rank: int = 0, placement: Placement | None = None) -> Backend:
    """The backend that the options ask for, with the device that `placement` gives one rank.

    Raises:
        Refused: its device or packages are not there.
    """
    placement = placement or Placement.on_one_node(options.num_ranks)
    if options.device is DeviceKind.CPU:
        from openinfer_engine.cpu.backend import CpuBackend

        return CpuBackend(options, placement=placement)
    waking = wake_driver(placement.places[rank].gpu)
    try:
        from openinfer_engine.cuda.backend import CudaBackend
    except KernelsError as error:  # the packages of the CUDA extras are missing; the message says which
        raise Refused(f"--device cuda: {error}") from error

    waking.join()
    return CudaBackend.open(options, rank=rank, placement=placement)
