"""What a plan asks of a GPU: one that is open, or one that is only named. Needs no CuPy."""

from collections.abc import Collection, Mapping
from typing import Protocol

from openinfer_core import Refused
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.memory_budget import kv_cache_share, slot_sizes, workspaces
from openinfer_engine.cuda.step_buckets import adapted_token_buckets, row_buckets, token_buckets
from openinfer_engine.drafting import max_drafts_of
from openinfer_engine.options import EngineOptions, LowBitActivations
from openinfer_engine.worker.paged_tensors import is_fp8, paged_regions
from openinfer_kernels import Code, KernelsError, WeightFormat
from openinfer_kernels.catalogue import kernels_by_part, measured_by_part
from openinfer_kernels.cubins.sources import HOPPER
from openinfer_kernels.cuda.sampling.slot_sizes import state_bytes
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.gpu_requirements import require_attention, require_entries, require_latents
from openinfer_kernels.weights.gpu_kernels import Way, described_way, way_of
from openinfer_kv_cache import FP8_SCALE_BYTES, KvDtype, KvLayout


class Gpu(Protocol):
    """The facts of a GPU."""

    @property
    def name(self) -> str:
        """As its maker calls it."""
        ...

    @property
    def architecture(self) -> str:
        """As compilers name it: `sm_90a`."""
        ...

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        ...

    def used_bytes(self) -> int:
        """In use by all processes."""
        ...


class PlannedGpu:
    """The part of a `Backend` that a plan asks; the memory ledger is the same for a GPU that is only named."""

    dtype = KvDtype.BFLOAT16

    def __init__(self, gpu: Gpu, options: EngineOptions) -> None:
        self._gpu = gpu
        self._options = options

    @property
    def architecture(self) -> str:
        return self._gpu.architecture

    @property
    def measured(self) -> dict[str, str]:
        return dict(measured_by_part(self._gpu.architecture))

    @property
    def collectives(self) -> str:
        """What ranks exchange sums by."""
        return "NCCL, sums in float32 in order of ranks"

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
        if self._options.batch_invariant and self._options.data_parallel_size > 1:
            raise Refused(
                "--batch-invariant: on GPUs a data-parallel rank adds its shared experts' part in its own place among "
                "the sums of ranks, so that bits depend on which rank has a request; give --data-parallel-size 1, or "
                "use --device cpu"
            )

    def check_low_bit(self, activations: Collection[Code], *, fp8_head: bool) -> None:
        asked = {
            "--low-bit-activations": bool(activations),
            "--fp8-head": fp8_head,
        }
        for option in (name for name, is_asked in asked.items() if is_asked):
            if self.architecture != HOPPER:
                raise Refused(
                    f"{option} has kernels for {HOPPER} alone, and this device is {self.architecture}; leave the "
                    "option out"
                )

    def kernels(self, *, provided: Collection[str]) -> dict[str, str]:
        replay = "captured once, replayed" if self._options.cuda_graph else "launched one by one"
        found: dict[str, str] = {
            "device": f"{self._gpu.name} ({self._gpu.architecture})",
            **({} if self._options.num_ranks == 1 else {"collectives": self.collectives}),
            "decode steps": replay,
            **kernels_by_part(self._gpu.architecture, skip=provided),
        }
        if self._options.batch_invariant:
            found["batch invariance"] = "no product divides K; each kernel's bits are compared before its first use"
            found["decode attention"] = found["prefill attention"]
            found["products"] = "cuBLASLt (its first algorithm that agrees bit for bit)"
        return found

    def way_of_weight(
        self, weight_format: WeightFormat, block: tuple[int, int], shape: tuple[int, ...], *, grouped: bool
    ) -> Way:
        """As `openinfer_kernels.cuda` decides it when the weight is loaded."""
        has_lowbit = self._gpu.architecture == HOPPER and not self._options.batch_invariant
        return way_of(weight_format, block, shape, has_lowbit=has_lowbit, grouped=grouped)

    def weight_kernels(self, products: Mapping[tuple[WeightFormat, Way], int]) -> dict[str, str]:
        lines = [f"{count} of {each}: {described_way(way, each)}" for (each, way), count in products.items()]
        return {"quantised weights": "; ".join(lines)} if lines else {}

    def workspaces(self, limits: WorkerLimits, *, max_step_tokens: int, num_ranks: int) -> Mapping[str, int]:
        is_capturing, max_drafts = self._options.cuda_graph, max_drafts_of(self._options)
        return workspaces(
            limits,
            max_step_tokens=max_step_tokens,
            slot_state_bytes=state_bytes(slot_sizes(limits)),
            decode_rows=row_buckets(limits.max_num_seqs) if is_capturing else (),
            mixed_tokens=token_buckets(limits) if is_capturing else (),
            adapted_tokens=adapted_token_buckets(self._options) if is_capturing else (),
            graphs_per_size=2 if self._options.num_adapter_slots else 1,  # with and without adapters
            num_ranks=num_ranks,
            gathered_tokens=(self._options.data_parallel_size - 1) * max_step_tokens,
            max_drafts=max_drafts,
            low_bit_activations=self._options.low_bit_activations is not LowBitActivations.OFF,
        )

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        """The rest of the share of memory that was granted; raises `Refused` if nothing is left, or others hold it."""
        return kv_cache_share(
            self._gpu.name,
            memory_bytes=self._gpu.memory_bytes,
            used_bytes=self._gpu.used_bytes(),
            fraction=self._options.gpu_memory_fraction,
            weights_bytes=weights_bytes,
            workspace_bytes=workspace_bytes,
        )

    def used_bytes(self) -> int:
        return self._gpu.used_bytes()


def _require_blocks(layout: KvLayout) -> None:
    if not layout.is_dense:
        for rows in paged_regions(layout):
            num_heads, _, entry_dim = rows.shape
            require_entries(num_heads=num_heads, entry_dim=entry_dim)
        return
    _, _, _, block_tokens, head_dim = layout.block_shape()
    if is_fp8(layout):
        head_dim -= FP8_SCALE_BYTES
        if set(layout.table_windows) != {None}:
            raise ArrayMismatchError(
                "attention with a window has no kernel that reads a KV cache in FP8; leave --kv-cache-dtype at auto"
            )
    if _has_latents(layout):
        require_latents(entry_dim=head_dim, block_tokens=block_tokens)
    else:
        require_attention(head_dim=head_dim, block_tokens=block_tokens)


def _has_latents(layout: KvLayout) -> bool:
    return layout.is_dense and layout.block_shape()[1] == 1
