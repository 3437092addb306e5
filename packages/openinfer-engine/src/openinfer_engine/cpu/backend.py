"""`CpuBackend`: engines on a CPU."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from openinfer_core import Refused
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits, make_states
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.distributed.socket_communicator import SocketCommunicator
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import EngineOptions, LowBitActivations
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import Code, ForeignMemory, Ops, WeightFormat
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps, LowBitCpuOps
from openinfer_kernels.weights.gpu_kernels import Way
from openinfer_kernels.weights.low_bit_activations import PromptSteps
from openinfer_kv_cache import KvDtype, KvLayout

_CPU_KV_CACHE_BYTES = 1 << 30


class CpuBackend:
    """NumPy in float32."""

    dtype = KvDtype.FLOAT32
    architecture = "cpu"
    measured: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, options: EngineOptions, *, placement: Placement | None = None) -> None:
        self._placement = placement or Placement.on_one_node(options.num_ranks)
        self._batch_invariant = options.batch_invariant
        self._activations = None if options.low_bit_activations is LowBitActivations.OFF else PromptSteps()
        self._fp8_head = options.fp8_head

    def enter_thread(self) -> None:
        pass

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        nodes = self._placement.nodes
        # Within one machine the sockets are in a folder that only their user can enter.
        address = self._placement.places[0].address if self._placement.spans_nodes else None
        return SocketCommunicator.open(size, nodes=nodes, address=address)

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        return SocketCommunicator.join(ticket, rank=rank, size=size)

    def thread_group(self, size: int) -> Sequence[Communicator]:
        return LocalGroup(size).communicators

    def check_layout(self, layout: KvLayout) -> None:
        del layout

    def check_low_bit(self, activations: Collection[Code], *, fp8_head: bool) -> None:
        """It has all of them."""
        del activations, fp8_head

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        operators = "cpu NumPy, float32" + (", batch-invariant" if self._batch_invariant else "")
        operators += f", but {', '.join(sorted(provided))}" if provided else ""
        return {"prefill": operators, "decode": operators, "sampling": "cpu NumPy, float64 sums"}

    def way_of_weight(
        self, weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...], *, grouped: bool
    ) -> None:
        del weight_format, block, shape, grouped

    def weight_kernels(self, products: Mapping[tuple[WeightFormat, Way], int]) -> dict[str, str]:
        del products
        return {}

    def workspaces(self, limits: WorkerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        del limits, max_step_tokens, num_ranks
        return {}  # not bounded: memory is the system allocator's

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        del weights_bytes, workspace_bytes
        return _CPU_KV_CACHE_BYTES

    def used_bytes(self) -> int:
        return 0

    def make_ops(self) -> Ops:
        if self._batch_invariant:
            return BatchInvariantCpuOps()
        if self._activations is None and not self._fp8_head:
            return CpuOps()
        return LowBitCpuOps(activations=self._activations, fp8_head=self._fp8_head)

    def weights_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drafter_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def adapters_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open_foreign(self, handle: bytes) -> ForeignMemory:
        del handle
        raise Refused("an engine on a CPU takes no weights by CUDA IPC handles; give a folder or shared memory")

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        return DummyWeights(shapes, rank=rank, size=size)

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
        kv_pool = make_pool(layout, num_blocks=num_blocks + span_blocks, ops=ops)
        states = make_states(layout, limits, ops=ops)
        mark("kv_cache")
        return CpuWorker(
            model,
            kv_pool=kv_pool,
            ops=ops,
            communicator=communicator,
            limits=limits,
            states=states,
            drafter=drafter,
            adapters=adapters,
            first_span_block=num_blocks,
            tracer=tracer,
        )
