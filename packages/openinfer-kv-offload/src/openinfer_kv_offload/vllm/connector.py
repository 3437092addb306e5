"""`OpenInferConnector`: vLLM's interface on the one hand, `SchedulerSide` and `WorkerSide` on the other."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor, PrefixHasher
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.settings import open_tiers
from openinfer_kv_offload.vllm.copies import PoolCopies
from openinfer_kv_offload.vllm.extra_config import read_extra_config
from openinfer_kv_offload.vllm.host import (
    VLLM_VERSION,
    ConnectorBase,
    ConnectorRole,
    SupportsHMA,
    TransferResults,
)
from openinfer_kv_offload.vllm.messages import StepMetadata, WorkerAnswers
from openinfer_kv_offload.vllm.scheduler_side import SchedulerSide
from openinfer_kv_offload.vllm.tables import read_groups
from openinfer_kv_offload.vllm.worker_side import WorkerSide


class OpenInferConnector(ConnectorBase, SupportsHMA):
    """KV blocks of vLLM in our tiers: found, loaded in the background, saved after each step.

    Models with one KV cache group of full attention, or with several of full attention and sliding windows, whose
    blocks have one size. Requests with images or prompt embeddings are left alone.

    Raises:
        TierConfigError: the configuration or the model is not one that this connector serves.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # pyright: ignore[reportUnknownMemberType]
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise TierConfigError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, which fails a request whose blocks a "
                'tier has lost; set it to "recompute"'
            )
        self._settings = read_extra_config(transfer.kv_connector_extra_config)
        self._num_blocks: int = kv_cache_config.num_blocks
        self._tables = read_groups(kv_cache_config.kv_cache_groups)
        self._config = vllm_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == ConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                PrefixHasher(self._tables.block_tokens, key=self._settings.digest_key()), self._tables
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The workers' side.

    @property
    def is_moving(self) -> bool:
        return self._worker is not None and self._worker.is_moving

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        from openinfer_kv_offload.vllm.torch_copies import TorchCopies

        tables = self._tables.layer_names if len(self._tables) > 1 else None
        self.attach(TorchCopies(kv_caches, num_blocks=self._num_blocks, tables=tables))

    def attach(self, copies: PoolCopies) -> None:
        """Opens the tiers for a pool; raises what `open_tiers` does."""
        parallel = self._config.parallel_config
        tiers = open_tiers(self._settings.tiers_of(rank=parallel.rank), self._layout(copies))
        self._worker = WorkerSide(
            tiers,
            copies,
            self._tables,
            staging_bytes=self._settings.staging_bytes,
            load_timeout_s=self._settings.load_timeout_s,
        )

    @property
    def unsaved_blocks(self) -> int:
        return 0 if self._worker is None else self._worker.unsaved_blocks

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_step(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before their request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Saves hold no request's blocks, so that none is reported as sent.
        return None, None if self._worker is None else self._worker.poll()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, and which of these requests vLLM computes anew: its blocks are not named by group."""
        if TransferResults is None:
            raise TierConfigError(f"vLLM {VLLM_VERSION} has no KVConnectorTransferResults")
        _, finished = self.get_finished(finished_req_ids)
        failed: set[str] = set() if self._worker is None else self._worker.take_failed_requests()
        return TransferResults(finished_recving=finished or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_block_ids()

    def build_connector_worker_meta(self) -> WorkerAnswers | None:
        return None if self._worker is None else self._worker.take_answers()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling().admitted(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduling().take_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        answers = connector_output.kv_connector_worker_meta
        if isinstance(answers, WorkerAnswers):
            self._scheduling().take_answers(answers)

    def request_finished(self, request: Any, block_ids: Sequence[Any]) -> tuple[bool, dict[str, Any] | None]:
        # False: its blocks may be freed now, since copies of them are queued before whatever will overwrite them.
        self._scheduling().finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise TierConfigError("a worker's connector was asked for what the scheduler's knows")
        return self._scheduler

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TierConfigError(f"{type(metadata).__name__} is not from this connector's scheduler side")
        return metadata

    def _layout(self, copies: PoolCopies) -> KvLayout:
        """A layout of so many bytes per token; what they mean is in the tag, which is part of the layout's digest."""
        model, parallel = self._config.model_config, self._config.parallel_config
        tag = {
            "vllm": VLLM_VERSION,
            "model": [model.model, model.revision, self._settings.model_tag],
            "rank": [parallel.rank, parallel.world_size],
            "layers": hashlib.blake2b(copies.identity.encode(), digest_size=16).hexdigest(),  # a tag is short
        }
        bytes_per_token, rest = divmod(copies.block_bytes, self._tables.block_tokens)
        if rest:
            raise TierConfigError(
                f"a block of {copies.block_bytes} bytes is not one of {self._tables.block_tokens} tokens"
            )
        tensor = PagedTensor(name="kv", num_heads=1, head_dim=bytes_per_token, dtype=KvDtype.UINT8)
        group = PagedGroup(name="vllm", num_layers=1, tensors=(tensor,))
        spec = KvSpec(model_tag=json.dumps(tag, sort_keys=True), paged=(group,))
        layout = KvLayout.from_spec(spec, block_size_tokens=self._tables.block_tokens)
        if len(self._tables) == 1:
            return layout
        # A block has the size of the largest table's; those of others end before it.
        groups = [
            msgspec.structs.replace(layout.groups[0], name=f"vllm_{group}", table=table, window_tokens=window)
            for table, (group, window) in enumerate(zip(self._tables.groups, self._tables.windows, strict=True))
        ]
        return msgspec.structs.replace(layout, groups=tuple(groups))
