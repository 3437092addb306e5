"""Asking a drafter what it requires, and checking it against the model's folder, before a weight is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.errors import BrokenPlugin
from openinfer_engine.drafters.contract import LATE_TOKENS, DrafterRequirements, DrafterSetting
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.fingerprint import fingerprint
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_tensor import spec_bytes
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec

SPAN_ROWS = 32
"""Rows that draft together, each in blocks that no sequence has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDrafter:
    """A drafter's requirements for each number of ranks."""

    name: str
    factory: Any
    definition: ModelDefinition[Any]
    model_config: Any
    model_dir: Path
    drafter_dir: Path | None
    tensors: Mapping[str, TensorInfo]
    max_drafts: int
    options: EngineOptions
    kv_dtype: KvDtype
    state_dtype: KvDtype
    _found: dict[int, DrafterRequirements] = field(default_factory=dict[int, DrafterRequirements], init=False)

    def requirements(self, num_ranks: int) -> DrafterRequirements:
        """For a model on so many ranks; the drafter is asked once for each number.

        Raises:
            Refused: it does not serve this model; the message names it.
            BrokenPlugin: it answers with something else.
        """
        if num_ranks not in self._found:
            self._found[num_ranks] = self._ask(num_ranks)
        return self._found[num_ranks]

    def _ask(self, num_ranks: int) -> DrafterRequirements:
        setting = DrafterSetting(
            definition=self.definition,
            model_config=self.model_config,
            model_dir=self.model_dir,
            drafter_dir=self.drafter_dir,
            tensors=self.tensors,
            options=self.options,
            max_drafts=self.max_drafts,
            block_size_tokens=self.options.block_size_tokens,
            num_ranks=num_ranks,
            kv_dtype=self.kv_dtype,
            state_dtype=self.state_dtype,
        )
        try:
            found = self.factory.requirements(setting)
        except (Refused, InvalidCheckpoint) as error:
            raise type(error)(f"drafter {self.name}: {error}") from error
        if not isinstance(found, DrafterRequirements):
            raise BrokenPlugin(f"drafter {self.name}: requirements() returned a {type(found).__name__}")
        return found

    def extended(self, spec: KvSpec) -> KvSpec:
        """A rank's spec with the drafter's groups, and a tag that names its weights, too."""
        asked = self.requirements(spec.num_ranks)
        if asked.slots and not spec.slots:
            raise Refused(f"drafter {self.name} keeps its state with recurrent states, and this model has none")
        own = "" if self.drafter_dir is None else f"+{fingerprint(self.drafter_dir)}"
        return msgspec.structs.replace(
            spec,
            model_tag=f"{spec.model_tag}{own}",
            paged=(*spec.paged, *asked.paged),
            slots=(*spec.slots, *asked.slots),
        )

    @property
    def folder(self) -> str | None:
        """Name and fingerprint of its own folder, for `openinfer plan` and its lock files."""
        return None if self.drafter_dir is None else f"{self.drafter_dir.name} {fingerprint(self.drafter_dir)}"

    def weights_bytes(self, num_ranks: int, *, itemsize_bytes: int) -> int:
        """What one rank has of its weights at most: they are counted whole."""
        asked = self.requirements(num_ranks)
        own = sum(spec_bytes(spec, itemsize_bytes=itemsize_bytes) for spec in asked.tensors.values())
        return own + asked.made_bytes

    def work_bytes(self, num_ranks: int) -> int:
        """What one rank keeps and works in, next to weights and the blocks of the pool, at most."""
        asked, options = self.requirements(num_ranks), self.options
        return (
            options.max_num_seqs * asked.bytes_per_sequence
            + max(options.max_step_tokens, LATE_TOKENS if asked.observes_late else 0) * asked.bytes_per_token
            + SPAN_ROWS * asked.bytes_per_row
        )

    def kv_bytes_per_token(self, num_ranks: int) -> int:
        return math.ceil(sum(group.bytes_per_token for group in self.requirements(num_ranks).paged))

    def span_blocks(self, num_ranks: int) -> int:
        """Blocks of the pool that no sequence has, for what drafts add."""
        asked = self.requirements(num_ranks)
        return SPAN_ROWS * blocks_of_span(asked, self.options.block_size_tokens) if asked.paged else 0

    def is_in(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint of the model has all of its tensors: where it has no folder of its own."""
        tensors = self.requirements(self.options.tensor_parallel_size).tensors
        return self.drafter_dir is None and bool(tensors) and tensors.keys() <= checkpoint.tensors.keys()

    def check_tensors(self, checkpoint: Checkpoint, folder: str) -> None:
        """Raises `InvalidCheckpoint` where its tensors do not fit, or others are there than it says there may be."""
        asked = self.requirements(self.options.tensor_parallel_size)
        others = asked.other_tensors
        if others is None:
            others = checkpoint.tensors.keys() - asked.tensors.keys()
        try:
            checkpoint.validate(asked.tensors, ignorable=others)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"drafter {self.name}, {folder}: {error}") from error

    def check(self, layout: KvLayout) -> None:
        """Raises `Refused` for what no worker hands over yet, and `InvalidCheckpoint` for tensors that do not fit."""
        asked = self.requirements(layout.num_ranks)
        if self.options.device is not DeviceKind.CPU and not asked.is_queued:
            raise Refused(
                f"drafter {self.name}: it reads the hidden states of prompts and keeps KV of its own on the host's "
                f"schedule, which steps on the device {self.options.device} do not wait for (`is_queued`); start with "
                "--device cpu, or --speculative off"
            )
        if self.options.device is not DeviceKind.CPU and asked.paged and self.kv_dtype is KvDtype.FLOAT8_E4M3:
            raise Refused(
                f"drafter {self.name}: its KV in FP8 is served on the device cpu alone, not on {self.options.device}; "
                "leave --kv-cache-dtype at auto, or start with --speculative off"
            )
        if asked.paged and layout.num_tables > 1:
            raise Refused(
                f"drafter {self.name}: its KV needs one block table, and layers with windows have {layout.num_tables}"
            )
        if asked.paged and not layout.is_dense:
            raise Refused(
                f"drafter {self.name}: its KV has another shape than the model's, and a block is one array of one shape"
            )
        if self.options.load_format is LoadFormat.SAFETENSORS:
            folder = self.drafter_dir or self.model_dir
            with Checkpoint.open(folder) as checkpoint:
                self.check_tensors(checkpoint, str(folder))


def blocks_of_span(asked: DrafterRequirements, block_size_tokens: int) -> int:
    """Of one row, wherever in a block its new positions begin."""
    return -(-(block_size_tokens - 1 + asked.span_tokens) // block_size_tokens)


def ask_drafter(
    factory: Any,
    *,
    name: str,
    drafter_dir: Path | None,
    definition: ModelDefinition[Any],
    model_config: Any,
    model_dir: Path,
    options: EngineOptions,
    max_drafts: int,
    kv_dtype: KvDtype,
    state_dtype: KvDtype,
) -> AskedDrafter | None:
    """The requirements of a drafter; None for one that has none, and then needs no folder.

    Raises:
        InvalidCheckpoint: its folder is none.
    """
    if not hasattr(factory, "requirements"):
        return None
    return AskedDrafter(
        name=name,
        factory=factory,
        definition=definition,
        model_config=model_config,
        model_dir=model_dir,
        drafter_dir=drafter_dir,
        tensors=_tensors_of(name, drafter_dir or model_dir, options),
        max_drafts=max_drafts,
        options=options,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
    )


def _tensors_of(name: str, folder: Path, options: EngineOptions) -> Mapping[str, TensorInfo]:
    if options.load_format is LoadFormat.DUMMY:
        return {}
    try:
        with Checkpoint.open(folder, keeps_gguf=options.keeps_gguf) as checkpoint:
            return dict(checkpoint.tensors)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"drafter {name}: {error}") from error
