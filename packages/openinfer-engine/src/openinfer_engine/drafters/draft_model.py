"""`DraftModelDrafter`: a small model of a served family drafts for a large one with the same vocabulary.

    step of the model ─► the draft model's forward pass over the same ids ─► its KV, at the same slots
    sampled           ─► the last token, then each draft after the other ─► the likeliest next token of each

Its KV is further layers of the model's blocks and made of ids alone, so that whatever shares, moves, evicts or
recomputes a block does so for both models: a cached prefix feeds the drafter, and no prompt is computed twice for it.
Where a layer of its KV has another shape than one of the model's, it lies in as many layers of the model's shape as it
takes, and is read through a view.

Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", with greedy drafts, which the
model's own samples are compared with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from openinfer_core import Refused, read_config
from openinfer_core.family import claim
from openinfer_core.plugins import MODELS, list_plugins
from openinfer_core.scheduling import SlotStart
from openinfer_engine.drafters.chains import draft_in_chains
from openinfer_engine.drafters.contract import (
    DrafterRequirements,
    DrafterSetting,
    DraftMemory,
    ObservedStep,
    late_bytes,
)
from openinfer_engine.drafting import MODEL_OPTION, DrafterContext
from openinfer_engine.model import KvLayers, LastTokenModel, LogitsIndices, Model, ModelDefinition
from openinfer_engine.options import DeviceKind
from openinfer_engine.served_context import longest_context
from openinfer_engine.vocabulary import check_same_vocabulary, read_num_token_ids
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_engine.weights.stored_config import config_as_stored, ignorable_tensors
from openinfer_kernels import Array, AttentionBatch, CacheFormat, PagedCache
from openinfer_kv_cache import KvDtype, PagedGroup

OPENINFER_CONTRACT = 1

GROUP = "draft_model"
"""The paged group of its KV."""
_NO_FOLDER = "name the folder of a smaller model: --speculative draft-model,model=DIR"
_LOGIT_BYTES = 8  # of one logit of a drafted row: float32, and scratch of finding the likeliest
# of one token of a step on a GPU: activations lie where the model's were, and this is for what does not fit there
_ACTIVATION_BYTES_PER_TOKEN = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A folder whose model can draft for another, before its weights are read."""

    definition: ModelDefinition[Any]
    """Of its family."""
    config: Any
    """The definition's typed config, with what the tensors say."""
    group: PagedGroup
    """What one rank keeps for each token."""
    is_of_one_shape: bool
    """Whether a layer of its KV has the shape of one of the model's."""


def read_draft_model(setting: DrafterSetting) -> DraftModel:
    """The draft model of a folder, held against the model that it is to draft for.

    Raises:
        Refused: no folder is named, no installed family serves it, or it cannot draft for this model.
        InvalidCheckpoint: the folder is incomplete or contradicts its config.
    """
    folder = setting.drafter_dir
    if folder is None:
        raise Refused(_NO_FOLDER)
    definition, config = _parsed(folder, setting)
    definition.check_device(setting.options.device)
    definition.check_ranks(config, setting.num_ranks)
    if setting.tensors:
        config = config_as_stored(definition, config, setting.tensors)
    _check_vocabulary(folder, definition, config, setting)
    _check_context(folder, definition, config, setting)
    group = _group_of(definition, config, setting)
    is_of_one_shape = _shapes(group) == _shapes(_model_groups(setting)[0])
    found = DraftModel(definition=definition, config=config, group=group, is_of_one_shape=is_of_one_shape)
    if setting.options.device is not DeviceKind.CPU:
        _check_gpu(found, setting.options.device)
    return found


def _parsed(folder: Path, setting: DrafterSetting) -> tuple[ModelDefinition[Any], Any]:
    published = read_config(folder)
    family, plugin = claim(published, list_plugins(MODELS))
    found: object = getattr(family, "definition", None)
    if not isinstance(found, ModelDefinition):
        raise Refused(f"{folder} is served by {plugin.described}, which has no ModelDefinition for this engine to load")
    definition = cast("ModelDefinition[Any]", found)
    if definition.extra_operators:
        raise Refused(f"{folder} is of the family {definition.name}, whose operators of its own are not there for it")
    if setting.kv_dtype is KvDtype.FLOAT8_E4M3:
        definition.check_cache_format(CacheFormat.FP8)
    return definition, definition.parse(published)


def _check_vocabulary(folder: Path, definition: ModelDefinition[Any], config: Any, setting: DrafterSetting) -> None:
    """Every id that the model may be given is a row of the draft model's embedding, and stands for the same text."""
    size = definition.limits(config).vocab_size
    model_size = setting.definition.limits(setting.model_config).vocab_size
    has_tokenizers = check_same_vocabulary(setting.model_dir, folder)
    if not has_tokenizers and setting.tensors:
        raise Refused(
            f"neither {setting.model_dir} nor {folder} has a tokenizer, so that nothing says whether their token ids "
            "stand for the same text"
        )
    if not has_tokenizers and size != model_size:
        raise Refused(f"{folder} has a vocabulary of {size}, and the model one of {model_size}")
    if has_tokenizers:
        read_num_token_ids(folder, vocab_size=size)  # no id is beyond its embedding


def _check_context(folder: Path, definition: ModelDefinition[Any], config: Any, setting: DrafterSetting) -> None:
    reach = definition.limits(config).max_model_tokens
    longest = longest_context(setting.options, setting.definition.limits(setting.model_config))
    if reach < longest:
        raise Refused(
            f"the position encoding of {folder} reaches {reach} tokens, and contexts have up to {longest}: start with "
            f"--max-model-tokens {reach}, or another draft model"
        )


def _group_of(definition: ModelDefinition[Any], config: Any, setting: DrafterSetting) -> PagedGroup:
    spec = definition.kv_spec(config, **_kv_options(setting))
    if spec.slots:
        raise Refused(
            f"a model of the family {definition.name} has recurrent states, which cannot be set back after refused "
            "drafts: it cannot be a draft model"
        )
    (group, *others) = spec.paged
    if others or group.window_tokens is not None or len(set(_shapes(group))) > 1 or _is_compressed(group):
        raise Refused(
            f"a model of the family {definition.name} has layers of several kinds, windows or compressed entries: only "
            "layers that keep all tokens alike can be a draft model's"
        )
    return group


def _is_compressed(group: PagedGroup) -> bool:
    return any(tensor.tokens_per_row != 1 for tensor in group.tensors)


def _model_groups(setting: DrafterSetting) -> tuple[PagedGroup, ...]:
    return setting.definition.kv_spec(setting.model_config, **_kv_options(setting)).paged


def _kv_options(setting: DrafterSetting) -> dict[str, Any]:
    return {
        "model_tag": "draft model",
        "kv_dtype": setting.kv_dtype,
        "state_dtype": setting.state_dtype,
        "num_ranks": setting.num_ranks,
        "rank_index": 0,
    }


def _check_gpu(found: DraftModel, device: DeviceKind) -> None:
    if not found.is_of_one_shape:
        raise Refused(
            f"its KV has another shape than the model's, which the kernels of the device {device} do not read; take a "
            "draft model with as many KV heads of the same size, or --device cpu"
        )
    if isinstance(found.config, QuantisedConfig) and found.config.stored is not None:
        raise Refused(f"its weights are quantised, which was not tried on the device {device}; take one in BF16")


def _kept_group(found: DraftModel, setting: DrafterSetting) -> PagedGroup:
    """Layers of the model's shape that hold the draft model's KV."""
    like, own = _model_groups(setting)[0], found.group
    if found.is_of_one_shape:
        return msgspec.structs.replace(own, name=GROUP)
    if setting.kv_dtype is KvDtype.FLOAT8_E4M3:
        raise Refused(
            "its KV has another shape than the model's, and FP8 holds one shape: leave --kv-cache-dtype at auto"
        )
    num_layers = math.ceil(own.num_layers * _numbers(own) / _numbers(like))
    tag = f"{own.num_layers} layers of {_shapes(own)} as a draft model keeps them: {own.rope_tag}"
    return msgspec.structs.replace(like, name=GROUP, num_layers=num_layers, rope_tag=tag, window_tokens=None)


def _numbers(group: PagedGroup) -> int:
    """Of one token and layer."""
    return sum(tensor.num_heads * tensor.head_dim for tensor in group.tensors)


def _shapes(group: PagedGroup) -> list[tuple[int, int]]:
    """Heads and their size, of each tensor."""
    return [(tensor.num_heads, tensor.head_dim) for tensor in group.tensors]


class DraftModelDrafter:
    """Implements `Drafter` and `KvDrafter` by a model folder (its option `model`).

    Raises:
        Refused: no folder is named, or its model cannot draft for this one.
        InvalidCheckpoint: its tensors are not right.
    """

    options: ClassVar[tuple[str, ...]] = (MODEL_OPTION,)
    """Of `--speculative`: the folder."""

    def __init__(self, context: DrafterContext) -> None:
        asked = context.requirements
        found: object = None if asked is None else asked.made_from
        if not isinstance(found, DraftModel) or context.weights is None:
            raise Refused(_NO_FOLDER)
        self.max_drafts = context.max_drafts
        self._ops = context.ops
        self._found = found
        self._model: Model = found.definition.load(
            found.config,
            context.weights,
            ops=context.ops,
            communicator=context.communicator,
            max_model_tokens=context.max_model_tokens + context.max_drafts,  # drafts may go beyond the last position
        )
        self._memory: DraftMemory | None = None
        self._layers: KvLayers = {}
        self._no_tokens: Array = self._ops.zeros((0,), np.int32)

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """Its tensors, and its layers of KV; raises as `read_draft_model`."""
        found = read_draft_model(setting)
        definition, config = found.definition, found.config
        vocab_size = definition.limits(config).vocab_size
        on_gpu = setting.options.device is not DeviceKind.CPU
        return DrafterRequirements(
            tensors=definition.tensors(config),
            other_tensors=ignorable_tensors(definition, config, setting.tensors),
            made_from=found,
            paged=(_kept_group(found, setting),),
            span_tokens=setting.max_drafts,
            is_queued=True,
            observes_late=True,
            reads_hidden=False,
            bytes_per_token=_ACTIVATION_BYTES_PER_TOKEN if on_gpu else 0,
            bytes_per_sequence=late_bytes(0, 0),
            bytes_per_row=_LOGIT_BYTES * vocab_size + (_ACTIVATION_BYTES_PER_TOKEN if on_gpu else 0),
        )

    def attach(self, memory: DraftMemory) -> None:
        own, kept = self._found.group, memory.layers[GROUP]
        self._memory = memory
        self._layers = {own.name: kept if self._found.is_of_one_shape else viewed_layers(own, kept)}

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Nothing: all that it keeps of a sequence lies in its blocks."""
        del starts

    def observe(self, step: ObservedStep) -> None:
        batch = _own_batch(step.batch)
        if isinstance(self._model, LastTokenModel):  # nothing is read of the last layer but its keys and values
            none = LogitsIndices(tokens=self._no_tokens, batch=batch)
            self._model.forward_last_tokens(step.token_ids, batch=batch, kv_cache=self._layers, last=none)
        else:
            self._model.forward(step.token_ids, batch=batch, kv_cache=self._layers)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        if self._memory is None:
            raise RuntimeError("the drafter was attached to no memory")
        return draft_in_chains(
            self._memory,
            slots,
            last_ids,
            hidden,
            lengths,
            max_drafts=self.max_drafts,
            forward=self._forward,
            likeliest=self._likeliest,
            ops=self._ops,
        )

    def settle(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> None:
        """Implements `SettlingDrafter`; nothing: what it goes on from lies in its blocks."""
        del slots, last_ids, hidden, lengths

    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """`[n, h]` after its last norm; the model's hidden states go on unread."""
        return self._model.forward(token_ids, batch=_own_batch(batch), kv_cache=self._layers), hidden

    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        return self._ops.draft_ids(self._model.logits(normed), drafts, column)


def viewed_layers(own: PagedGroup, kept: Sequence[PagedCache]) -> tuple[PagedCache, ...]:
    """The layers of a group in memory of layers of another shape, which it begins at the first of.

    `[blocks, layers, tensors, heads, block tokens, head_dim]`, as a block of such layers alone would be.
    """
    first, tensor = kept[0], own.tensors[0]
    memory = first.data
    per_layer = math.prod(memory.shape[2:])
    shape = (own.num_layers, len(own.tensors), tensor.num_heads, memory.shape[-2], tensor.head_dim)
    begin = first.layer * per_layer
    numbers = memory.reshape(len(memory), -1)[:, begin : begin + math.prod(shape)]
    data = numbers.reshape(len(memory), *shape)
    return tuple(replace(first, data=data, layer=layer, is_first_layer=layer == 0) for layer in range(own.num_layers))


def _own_batch(batch: AttentionBatch) -> AttentionBatch:
    """Where tokens stand, without the model's states and adapters."""
    if batch.adapter_slots is None and not batch.states and batch.state_slots is None:
        return batch
    none: Mapping[str, Array] = {}
    return replace(batch, adapter_slots=None, state_slots=None, states=none, kept=None, kept_rows=None)
