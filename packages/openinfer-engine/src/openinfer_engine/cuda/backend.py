"""The CUDA backend: one GPU of one rank, its memory ledger, and ranks whose decode steps are captured."""

from collections.abc import Callable, Collection, Mapping
from typing import Self

from openinfer_core import Refused
from openinfer_engine.cpu.worker import WorkerLimits, make_states
from openinfer_engine.cuda.memory_budget import kv_cache_share, slot_sizes, workspaces
from openinfer_engine.cuda.step_buckets import row_buckets, token_buckets
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.nccl_communicator import NcclCommunicator
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import EngineOptions, RankHost
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.weights.dummy import DeviceDummyWeights
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_engine.worker.paged_tensors import make_pool, paged_regions, paged_tensors
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import KernelsError, Ops
from openinfer_kernels.catalogue import kernels_by_part, measured_by_part
from openinfer_kernels.cuda.batch_invariant import BatchInvariantCudaOps
from openinfer_kernels.cuda.comm.nccl import library as nccl_library
from openinfer_kernels.cuda.comm.nccl import unique_id
from openinfer_kernels.cuda.comm.nccl import version as nccl_version
from openinfer_kernels.cuda.common.device import Device, gpu_count
from openinfer_kernels.cuda.ops import CudaOps
from openinfer_kernels.cuda.sampling.slot_sizes import state_bytes
from openinfer_kernels.gpu_requirements import require_attention, require_entries, require_latents
from openinfer_kv_cache import KvDtype, KvLayout


class CudaBackend:
    """One GPU for one engine."""

    dtype = KvDtype.BFLOAT16

    def __init__(self, device: Device, options: EngineOptions) -> None:
        self._device = device
        self._options = options

    @classmethod
    def open(cls, options: EngineOptions, *, rank: int = 0) -> Self:
        """The GPU of one rank: rank 0 has the first that the process sees, rank 1 the second.

        Raises:
            Refused: too few GPUs, an old driver, missing packages, or what cannot be done on GPUs.
        """
        if options.drafter is not None:
            raise Refused("--drafter: drafts are verified on --device cpu only; leave the option out")
        try:
            if options.tensor_parallel_size > 1:
                _check_ranks(options)
            return cls(Device.open(rank), options)
        except KernelsError as error:
            raise Refused(f"--device cuda: {error}") from error

    def enter_thread(self) -> None:
        # A thread begins with GPU 0 as its current device, whatever the device of the one that started it.
        self._device.use()

    def open_group(self, size: int) -> tuple[bytes, Communicator]:
        ticket = unique_id()
        return ticket, self.join_group(ticket, rank=0, size=size)

    def join_group(self, ticket: bytes, *, rank: int, size: int) -> Communicator:
        return NcclCommunicator(ticket, rank=rank, size=size, device=self._device)

    @property
    def architecture(self) -> str:
        return self._device.architecture

    def check_layout(self, layout: KvLayout) -> None:
        try:
            _require_blocks(layout)
        except KernelsError as error:
            raise Refused(f"--device cuda: {error}") from error
        if self._options.batch_invariant and _has_latents(layout):
            raise Refused(
                "--batch-invariant: attention over latents has no such kernel on GPUs; leave the option out, or use "
                "--device cpu"
            )

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        replay = "captured once, replayed" if self._options.cuda_graph else "launched one by one"
        found: dict[str, str] = {
            "device": f"{self._device.name} ({self._device.architecture})",
            **self._collectives,
            "decode steps": replay,
            **kernels_by_part(self._device.architecture, skip=provided),
        }
        if self._options.batch_invariant:
            found["batch invariance"] = "no product divides K; each kernel's bits are compared before its first use"
            found["decode attention"] = found["prefill attention"]
            found["products"] = "cuBLASLt (its first algorithm that agrees bit for bit)"
        return found

    @property
    def _collectives(self) -> dict[str, str]:
        if self._options.tensor_parallel_size == 1:
            return {}
        return {"collectives": f"NCCL {nccl_version()}, sums in float32 in order of ranks"}

    @property
    def measured(self) -> dict[str, str]:
        return dict(measured_by_part(self._device.architecture))

    def workspaces(self, limits: WorkerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        is_capturing = self._options.cuda_graph
        return workspaces(
            limits,
            max_step_tokens=max_step_tokens,
            slot_state_bytes=state_bytes(slot_sizes(limits)),
            decode_rows=row_buckets(limits.max_num_seqs) if is_capturing else (),
            mixed_tokens=token_buckets(limits) if is_capturing else (),
            num_ranks=num_ranks,
        )

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        """The rest of the share of memory that was granted; raises `Refused` if nothing is left, or others hold it."""
        return kv_cache_share(
            self._device.name,
            memory_bytes=self._device.memory_bytes,
            used_bytes=self._device.used_bytes(),
            fraction=self._options.gpu_memory_fraction,
            weights_bytes=weights_bytes,
            workspace_bytes=workspace_bytes,
        )

    def used_bytes(self) -> int:
        return self._device.used_bytes()

    def make_ops(self) -> Ops:
        return BatchInvariantCudaOps(self._device) if self._options.batch_invariant else CudaOps(self._device)

    def dummy_weights(self, shapes: Mapping[str, TensorSpec], *, rank: int, size: int) -> WeightSource:
        return DeviceDummyWeights(shapes, rank=rank, size=size)

    def make_worker(
        self,
        model: Model,
        *,
        ops: Ops,
        num_blocks: int,
        layout: KvLayout,
        communicator: Communicator,
        limits: WorkerLimits,
        drafter: SharedDrafter | None,
        mark: Callable[[str], None],
        tracer: Tracer,
    ) -> Worker:
        del drafter  # refused by `open`
        kv_cache = make_pool(layout, num_blocks=num_blocks, ops=ops)
        states = make_states(layout, limits, ops=ops)
        mark("kv_cache")
        if not isinstance(ops, CudaOps):
            raise TypeError("operators of another backend")
        rank = CudaWorker(
            model,
            kv_cache=kv_cache,
            ops=ops,
            communicator=communicator,
            limits=limits,
            states=states,
            caches=paged_tensors(layout, kv_cache),
            tracer=tracer,
        )
        rank.warm_up(capture=self._options.cuda_graph, mark=mark)
        return rank


def _require_blocks(layout: KvLayout) -> None:
    if not layout.is_dense:
        for rows in paged_regions(layout):
            num_heads, _, entry_dim = rows.shape
            require_entries(num_heads=num_heads, entry_dim=entry_dim)
        return
    _, _, _, block_tokens, head_dim = layout.block_shape()
    if _has_latents(layout):
        require_latents(entry_dim=head_dim, block_tokens=block_tokens)
    else:
        require_attention(head_dim=head_dim, block_tokens=block_tokens)


def _has_latents(layout: KvLayout) -> bool:
    return layout.is_dense and layout.block_shape()[1] == 1


def _check_ranks(options: EngineOptions) -> None:
    """Raises:
    Refused: this machine cannot run so many ranks.
    DeviceUnavailableError: NCCL is not installed, or there is no GPU at all.
    """
    size = options.tensor_parallel_size
    if options.rank_host is RankHost.THREAD:
        raise Refused("--rank-host thread: on GPUs each rank needs a process of its own; leave the option out")
    count = gpu_count()
    if count < size:
        raise Refused(
            f"tensor_parallel_size is {size}, and this machine has {count} GPUs that the process can see "
            "(CUDA_VISIBLE_DEVICES): each rank needs one"
        )
    nccl_library()
