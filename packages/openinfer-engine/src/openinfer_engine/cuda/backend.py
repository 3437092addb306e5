"""The CUDA backend: one GPU of one rank, its memory ledger, and ranks whose decode steps are captured."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_engine.cpu.worker import WorkerLimits, make_states
from openinfer_engine.cuda.planned_gpu import PlannedGpu
from openinfer_engine.cuda.step_buckets import adapted_token_buckets
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.nccl_communicator import NcclCommunicator
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import THREAD_RANKS, EngineOptions, LowBitActivations
from openinfer_engine.ranks.interfaces import interface_of
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.weights.dummy import DeviceDummyWeights
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import ForeignMemory, KernelsError, Ops
from openinfer_kernels.cuda.batch_invariant import BatchInvariantCudaOps
from openinfer_kernels.cuda.comm.nccl import library as nccl_library
from openinfer_kernels.cuda.comm.nccl import register_no_buffers, unique_id, use_interface
from openinfer_kernels.cuda.comm.nccl import version as nccl_version
from openinfer_kernels.cuda.common.device import Device, gpu_count
from openinfer_kernels.cuda.common.ipc import IpcMemory
from openinfer_kernels.cuda.common.mapped_memory import MappedMemory
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.weights.low_bit_activations import PromptSteps
from openinfer_kv_cache import KvLayout


class CudaBackend(PlannedGpu):
    """One GPU for one engine."""

    def __init__(self, device: Device, options: EngineOptions, *, placement: Placement) -> None:
        super().__init__(device, options)
        self._device = device
        self._placement = placement
        self._sleeping_memory = MappedMemory(device) if options.enable_sleep else None

    @classmethod
    def open(cls, options: EngineOptions, *, rank: int = 0, placement: Placement) -> Self:
        """The GPU that the placement gives a rank, among those that the process sees.

        Raises:
            Refused: too few GPUs, an old driver, missing packages, or what cannot be done on GPUs.
        """
        try:
            if options.num_ranks > 1:
                _check_ranks(options, rank=rank, placement=placement)
            return cls(Device.open(placement.places[rank].gpu), options, placement=placement)
        except KernelsError as error:
            raise Refused(f"--device cuda: {error}") from error

    def enter_thread(self) -> None:
        # A thread begins with GPU 0 as its current device, whatever the device of the one that started it.
        self._device.use()

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        ticket = unique_id()
        return ticket, self.join_group(ticket, rank=0, size=size)

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        nodes = self._placement.nodes
        if self._placement.spans_nodes and not self._placement.places[rank].address:
            raise Refused(f"--rank-host: it does not say by which address the other nodes reach rank {rank}")
        deals_experts = self._options.data_parallel_size > 1
        return NcclCommunicator(
            ticket, rank=rank, size=size, device=self._device, nodes=nodes, deals_experts=deals_experts
        )

    def thread_group(self, size: int) -> Sequence[Communicator]:
        raise ContractViolation(f"{size} ranks on GPUs are processes")

    @property
    def collectives(self) -> str:
        order = "ranks within a node, and of nodes" if self._placement.spans_nodes else "ranks"
        return f"NCCL {nccl_version()}, sums in float32 in order of {order}"

    def make_ops(self) -> Ops:
        options = self._options
        if options.batch_invariant:
            return BatchInvariantCudaOps(self._device)
        activations = None if options.low_bit_activations is LowBitActivations.OFF else PromptSteps()
        return CudaOps(self._device, activations=activations, fp8_head=options.fp8_head)

    def weights_memory(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sleeping_memory is None else self._sleeping_memory.of_weights()

    @contextmanager
    def drafter_memory(self) -> Generator[None]:
        try:
            with nullcontext() if self._sleeping_memory is None else self._sleeping_memory.of_drafter():
                yield
        except MemoryError as error:
            raise Refused(
                f"--enable-sleep: the drafter cannot be kept asleep: {error}; leave one of them out"
            ) from error

    def adapters_memory(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sleeping_memory is None else self._sleeping_memory.of_kv()

    def open_foreign(self, handle: bytes) -> ForeignMemory:
        try:
            return IpcMemory(self._device, handle)
        except KernelsError as error:
            raise Refused(f"weights on a GPU: {error}") from error

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        return DeviceDummyWeights(shapes, rank=rank, size=size)

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
        memory = self._sleeping_memory
        with nullcontext() if memory is None else memory.of_kv():
            kv_pool = make_pool(layout, num_blocks=num_blocks + span_blocks, ops=ops)
            states = make_states(layout, limits, ops=ops)
        mark("kv_cache")
        if not isinstance(ops, CudaOps):
            raise TypeError("operators of another backend")
        rank = CudaWorker(
            model,
            kv_pool=kv_pool,
            ops=ops,
            communicator=communicator,
            limits=limits,
            states=states,
            drafter=drafter,
            sleeping_memory=memory,
            adapters=adapters,
            adapted_tokens=adapted_token_buckets(self._options),
            first_span_block=num_blocks,
            # A tier copies blocks that a drafter may not have filled yet; a sleep gives back what is kept for it.
            shows_late=not self._options.kv_tier and memory is None,
            tracer=tracer,
        )
        rank.warm_up(capture=self._options.cuda_graph, mark=mark)
        return rank


def _check_ranks(options: EngineOptions, *, rank: int, placement: Placement) -> None:
    """Raises:
    Refused: this machine cannot run those ranks that the placement has here.
    DeviceUnavailableError: NCCL is not installed, or there is no GPU at all.
    """
    # Threads would share the driver's lock: a call that waits for the devices holds up the launch which they wait for.
    if options.rank_host == THREAD_RANKS:
        raise Refused("--rank-host thread: on GPUs each rank needs a process of its own; leave the option out")
    count, gpus = gpu_count(), placement.gpus_of_node(rank)
    if count <= max(gpus):
        name = "data_parallel_size" if options.data_parallel_size > 1 else "tensor_parallel_size"
        raise Refused(
            f"{name} is {options.num_ranks}, of which {len(gpus)} ranks are on this machine and take GPUs {gpus}, and "
            f"it has {count} GPUs that the process can see (CUDA_VISIBLE_DEVICES): each rank needs one"
        )
    address = placement.places[rank].address
    if placement.spans_nodes and address:  # in a plan there is none
        use_interface(interface_of(address))
    if options.enable_sleep:
        register_no_buffers()
    nccl_library()
