"""DSpark for Qwen3: DFlash's layers, and a small head by which each draft of a block depends on the one before.

    places of a block ─► the layers of `BlockDrafter` ─► head ─► logits, of all places at once
    the token before  ─► w1 ─► w2 ─► added to a place's logits ─► the likeliest: from left to right

Folders of DeepSpec (`Qwen3DSparkModel`: `deepspec/modeling/dspark`) and of speculators (`speculators_model_type:
dspark`). Drafts are those of vLLM's `qwen3_dspark` and `DSparkSpeculator`, the likeliest token of each place. The head
for confidences, by which a server may verify fewer drafts than there are, is not read: how many are worth their cost is
known here by what requests accept of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from openinfer_core import Refused, read_config
from openinfer_engine import DrafterContext
from openinfer_engine.drafters.contract import DrafterRequirements, DrafterSetting
from openinfer_engine.options import DeviceKind
from openinfer_engine.refusals import shortened
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array
from openinfer_qwen3.block_drafter import (
    BlockConfig,
    BlockDrafter,
    Positive,
    block_requirements,
    block_tensors,
    check_served,
    parse_block_config,
)
from openinfer_qwen3.drafter_folders import folder_and_model, map_tensors, no_folder, target_ids
from openinfer_qwen3.model import Qwen3Config, Qwen3Model

OPENINFER_CONTRACT = 1

ATTENTION = "dspark"
"""The paged group of its layers."""
_NATIVE, _SPECULATORS = "Qwen3DSparkModel", "dspark"
_UNREAD = ("confidence_head.proj.weight", "confidence_head.proj.bias", "mask_embedding")
_VECTOR = 8  # numbers of BF16 that a GPU's kernels read at once


class DSparkConfig(BlockConfig, frozen=True, kw_only=True):
    """The layers, and what is made of their hidden states."""

    markov_rank: Positive
    draft_vocab_size: Positive
    has_embedding: bool
    has_head: bool
    has_map: bool
    has_mask: bool
    """As in `VocabularyMap`."""


def read_dspark(folder: Path, model: Qwen3Config, names: Mapping[str, Any]) -> DSparkConfig:
    """The config of a folder for a model; `names` are its tensors, none of random weights.

    Raises:
        InvalidCheckpoint: the folder or its config is not whole.
        Refused: a variant that is not served, or a drafter of another model; the message names it.
    """
    published = read_config(folder)
    said = _said(folder, published)
    check_served(said, reasons=_reasons(said, model))
    fields = {
        **said,
        "sample_from_anchor": _sample_from_anchor(said, is_native="speculators_model_type" not in published),
        "draft_vocab_size": said.get("draft_vocab_size") or said.get("vocab_size"),
        "has_embedding": "embed_tokens.weight" in names,
        "has_head": "lm_head.weight" in names,
        "has_map": "d2t" in names,
        "has_mask": "t2d" in names,
    }
    config = parse_block_config(DSparkConfig, fields, folder=folder, model=model, name="DSpark")
    _check_vocabulary(config)
    return config


def _said(folder: Path, published: Mapping[str, Any]) -> dict[str, Any]:
    """What either layout says, in the words of the native one."""
    kind, architectures = published.get("speculators_model_type"), published.get("architectures")
    if kind != _SPECULATORS and (kind is not None or architectures != [_NATIVE]):
        raise Refused(f"{folder} is no DSpark folder for Qwen3: its architectures are {shortened(architectures)}")
    parts = [published.get(name) for name in ("transformer_layer_config", "dflash_config")]
    layer, nested = (cast("dict[str, Any]", part) if isinstance(part, dict) else {} for part in parts)
    said = {**layer, **{key: value for key, value in published.items() if value is not None}, **nested}
    if kind == _SPECULATORS:
        # Its ids name the layers whose input is read.
        ids: Any = published.get("aux_hidden_state_layer_ids") or []
        said["target_layer_ids"] = [each - 1 if isinstance(each, int) else each for each in ids]
        said["model_type"] = layer.get("model_type")
    return said


def _reasons(said: Mapping[str, Any], model: Qwen3Config) -> list[str]:
    """Why a folder is not served, by what DSpark's folders say in addition to DFlash's."""
    reasons: list[str] = []
    if (kind := said.get("model_type")) != "qwen3":
        reasons.append(f"model_type is {shortened(kind)}: only layers of Qwen3 are served")
    if (head := said.get("markov_head_type", "vanilla")) != "vanilla":
        reasons.append(f"markov_head_type is {shortened(head)}: only 'vanilla' is served")
    if said.get("topk_context"):
        reasons.append(
            f"topk_context is {shortened(said['topk_context'])}: only attention to the whole context is served"
        )
    width = said.get("target_hidden_size") or model.hidden_size
    if width != model.hidden_size:
        reasons.append(f"target_hidden_size is {width}, and the model's {model.hidden_size}")
    depth = said.get("num_target_layers") if "aux_hidden_state_layer_ids" not in said else None
    if depth is not None and depth != model.num_hidden_layers:
        reasons.append(f"it was made for a model of {depth} layers, and this one has {model.num_hidden_layers}")
    return reasons


def _sample_from_anchor(said: Mapping[str, Any], *, is_native: bool) -> bool:
    """Whether the last token's place drafts the first token."""
    if "sample_from_anchor" in said:
        return said["sample_from_anchor"]
    if "dspark_bonus_anchor" in said:
        return not said["dspark_bonus_anchor"]
    if is_native:  # as DeepSpec trains all of them
        return True
    raise Refused(
        "sample_from_anchor is not said, and folders of speculators were made with and without: say it in its config"
    )


def _check_vocabulary(config: DSparkConfig) -> None:
    size, whole = config.draft_vocab_size, config.vocab_size
    if size > whole:
        raise Refused(f"draft_vocab_size is {size} of {whole}")
    if size < whole and not (config.has_head and config.has_map):
        raise Refused(f"draft_vocab_size is {size} of {whole}, and lm_head.weight or d2t is missing")


def dspark_tensors(config: DSparkConfig) -> dict[str, TensorSpec]:
    """Every tensor of the folder that is read."""
    tensors = block_tensors(config) | map_tensors(config)
    tensors["markov_head.markov_w1.weight"] = (config.vocab_size, config.markov_rank)
    tensors["markov_head.markov_w2.weight"] = (config.draft_vocab_size, config.markov_rank)
    if config.has_embedding:
        tensors["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    if config.has_head:
        tensors["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkHeads:
    """What is made of hidden states, whole on each rank."""

    markov_w1: Array
    """`[V, r]`: of the token before."""
    markov_w2: Array
    """`[V_d, r]`"""
    embed_tokens: Array | None
    """`[V, h]`; None: the model's."""
    lm_head: Array | None
    """`[V_d, h]`; None: the model's."""
    target_ids: Array | None
    """`[V_d]` int32: token id of each id of the head; None: the same."""


class DSparkDrafter(BlockDrafter):
    """Implements `Drafter` and `KvDrafter` by a DSpark folder (its option `model`).

    Raises:
        Refused: the folder is another model's.
        InvalidCheckpoint: its tensors or its vocabulary map are not right.
    """

    options: ClassVar[tuple[str, ...]] = ("model",)
    """Of `--speculative`: the folder."""

    def __init__(self, context: DrafterContext) -> None:
        asked, model = context.requirements, context.model
        if not isinstance(model, Qwen3Model) or asked is None:
            raise Refused("dspark drafts for Qwen3 models, from the folder that its option model names")
        if context.drafter_dir is None or context.weights is None:
            raise Refused(no_folder("dspark"))
        config = read_dspark(context.drafter_dir, model.config, asked.tensors)
        super().__init__(context, config, model, group=ATTENTION)
        loader = WeightLoader(context.weights, ops=context.ops, communicator=context.communicator)
        self._heads = DSparkHeads(
            markov_w1=loader.plain("markov_head.markov_w1.weight"),
            markov_w2=loader.plain("markov_head.markov_w2.weight"),
            embed_tokens=loader.plain("embed_tokens.weight") if config.has_embedding else None,
            lm_head=loader.plain("lm_head.weight") if config.has_head else None,
            target_ids=context.ops.upload(target_ids(config, context.weights)) if config.has_map else None,
        )

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """Its layers of KV, and a tap after each layer that it reads.

        Raises:
            Refused: no folder, another family's model, or a folder that is another model's or not served.
            InvalidCheckpoint: its config is not valid.
        """
        folder, model = folder_and_model(setting, "dspark")
        config = read_dspark(folder, model, setting.tensors)
        if setting.options.device is not DeviceKind.CPU and config.markov_rank % _VECTOR:
            raise Refused(f"markov_rank is {config.markov_rank}: on a GPU only multiples of {_VECTOR} are served")
        return block_requirements(
            config,
            setting,
            name=ATTENTION,
            tensors=dspark_tensors(config),
            other_tensors=_UNREAD,
            logits_per_draft=config.draft_vocab_size,
            logits_per_row=config.draft_vocab_size,
        )

    @property
    def _embed_tokens(self) -> Array:
        own = self._heads.embed_tokens
        return super()._embed_tokens if own is None else own

    def _choose(self, hidden: Array, last_ids: Array, drafts: Array) -> None:
        ops, heads, count = self._ops, self._heads, self.max_drafts
        of_places = self._model.logits(hidden) if heads.lm_head is None else ops.logits(hidden, heads.lm_head)
        ids = last_ids
        for index in range(count):
            logits = ops.logits(ops.embedding(ids, heads.markov_w1), heads.markov_w2)
            ops.add_logits(logits, of_places, first=index, step=count)
            ids = ops.draft_ids(logits, drafts, index, token_ids=heads.target_ids)
