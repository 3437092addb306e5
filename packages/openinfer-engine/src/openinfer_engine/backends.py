"""`Backend`: what an engine asks of a kind of device before and while it loads a model.

The CUDA backend's modules are imported when it is chosen, so that a CPU engine needs none of its packages.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from openinfer_core import Refused
from openinfer_engine.communicator import Communicator
from openinfer_engine.dummy import DummyWeights
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import DeviceKind, EngineOptions
from openinfer_engine.paged_tensors import make_pool, paged_tensors
from openinfer_engine.rank import RankRunner, RunnerLimits
from openinfer_engine.runner import Rank
from openinfer_engine.socket_communicator import SocketCommunicator
from openinfer_engine.state_slots import StateSlots
from openinfer_engine.stored_tensor import TensorSpec
from openinfer_engine.trace import Tracer
from openinfer_kernels import KernelsError, Ops
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.driver import wake_driver
from openinfer_kv_cache import KvDtype, KvLayout

_CPU_KV_CACHE_BYTES = 1 << 30


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

    def check_layout(self, layout: KvLayout) -> None:
        """Raises `Refused` for blocks that its operators do not serve."""
        ...

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        """Which implementation serves each phase, for `openinfer plan`; `provided` operators are somebody else's."""
        ...

    @property
    def measured(self) -> dict[str, str]:
        """What was measured of some of them, and of what could stand in their place."""
        ...

    def workspaces(self, limits: RunnerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        """What steps need beside weights and KV, at most: purpose -> bytes on the device of one of so many ranks."""
        ...

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        """What the KV cache may take by default.

        Raises:
            Refused: nothing is left.
        """
        ...

    def used_bytes(self) -> int:
        """Of the device's memory, by everyone; 0 where the device has none of its own."""
        ...

    def make_ops(self) -> Ops:
        """The operators, for one rank."""
        ...

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        """Random weights, made where that is quickest."""
        ...

    def make_rank(
        self,
        model: Model,
        *,
        ops: Ops,
        num_blocks: int,
        layout: KvLayout,
        communicator: Communicator,
        limits: RunnerLimits,
        mark: Callable[[str], None],
        tracer: Tracer,
    ) -> Rank:
        """The rank that runs a loaded model, warmed up; `mark` is told the name of each phase that has ended."""
        ...


def open_backend(options: EngineOptions, *, rank: int = 0) -> Backend:
    """The backend that the options ask for, with the device of one rank.

    Raises:
        Refused: its device or packages are not there.
    """
    if options.device is DeviceKind.CPU:
        return CpuBackend(options)
    waking = wake_driver(rank)
    try:
        from openinfer_engine.cuda_backend import CudaBackend
    except KernelsError as error:  # the packages of the CUDA extras are missing; the message says which
        raise Refused(f"--device cuda: {error}") from error

    waking.join()
    return CudaBackend.open(options, rank=rank)


class CpuBackend:
    """NumPy in float32."""

    dtype = KvDtype.FLOAT32
    architecture = "cpu"
    measured: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, options: EngineOptions) -> None:
        self._batch_invariant = options.batch_invariant

    def enter_thread(self) -> None:
        """All threads are alike."""

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        """Over sockets."""
        return SocketCommunicator.open(size)

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        """Over sockets."""
        return SocketCommunicator.join(ticket, rank=rank, size=size)

    def check_layout(self, layout: KvLayout) -> None:
        """All are served."""
        del layout

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        """NumPy alone, but for what is provided."""
        operators = "cpu NumPy, float32" + (", batch-invariant" if self._batch_invariant else "")
        operators += f", but {', '.join(sorted(provided))}" if provided else ""
        return {"prefill": operators, "decode": operators, "sampling": "cpu NumPy, float64 sums"}

    def workspaces(self, limits: RunnerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        """Not bounded: the system's allocator gives and takes."""
        del limits, max_step_tokens, num_ranks
        return {}

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        """1 GiB."""
        del weights_bytes, workspace_bytes
        return _CPU_KV_CACHE_BYTES

    def used_bytes(self) -> int:
        """None of its own."""
        return 0

    def make_ops(self) -> Ops:
        """Stateless."""
        return BatchInvariantCpuOps() if self._batch_invariant else CpuOps()

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        """Pieces of one sequence."""
        return DummyWeights(shapes, rank=rank, size=size)

    def make_rank(
        self,
        model: Model,
        *,
        ops: Ops,
        num_blocks: int,
        layout: KvLayout,
        communicator: Communicator,
        limits: RunnerLimits,
        mark: Callable[[str], None],
        tracer: Tracer,
    ) -> Rank:
        """Needs no warming."""
        kv_cache = make_pool(layout, num_blocks=num_blocks, ops=ops)
        has_states = layout.slot_bytes > 0
        num_slots = limits.max_num_seqs + limits.num_snapshots
        states = StateSlots(layout, num_slots=num_slots, slot_bytes=limits.slot_bytes, ops=ops) if has_states else None
        mark("kv_cache")
        return RankRunner(
            model,
            kv_cache=kv_cache,
            ops=ops,
            communicator=communicator,
            limits=limits,
            states=states,
            caches=paged_tensors(layout, kv_cache),
            tracer=tracer,
        )
