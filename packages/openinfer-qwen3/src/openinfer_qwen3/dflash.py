"""DFlash for Qwen3: a folder with a few layers that draft a block of tokens at once, each place by itself.

Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding"; keys and tensors of the folder as in vLLM's
`qwen3_dflash`. Embedding and head are the model's. The layers are `BlockDrafter`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from openinfer_core import Refused, read_config
from openinfer_engine import DrafterContext
from openinfer_engine.drafters.contract import DrafterRequirements, DrafterSetting
from openinfer_engine.refusals import shortened
from openinfer_kernels import Array
from openinfer_qwen3.block_drafter import (
    BlockConfig,
    BlockDrafter,
    block_requirements,
    block_tensors,
    check_served,
    parse_block_config,
)
from openinfer_qwen3.drafter_folders import folder_and_model, no_folder
from openinfer_qwen3.model import Qwen3Config, Qwen3Model

OPENINFER_CONTRACT = 1

ATTENTION = "dflash"
"""The paged group of its layers."""
_OWN = "embed_tokens.", "lm_head.", "mask_embedding", "markov_head."
"""Tensors without which the layers draft something else."""


def read_dflash(folder: Path, model: Qwen3Config, names: Mapping[str, Any]) -> BlockConfig:
    """The config of a folder for a model; `names` are its tensors, none of random weights.

    Raises:
        InvalidCheckpoint: the folder or its config is not whole.
        Refused: a variant that is not served, or a drafter of another model; the message names it.
    """
    published = read_config(folder)
    nested: object = published.get("dflash_config")
    if "dflash" not in str(published.get("architectures")).lower() or not isinstance(nested, dict):
        raise Refused(
            f"{folder} is no DFlash folder: its architectures are {shortened(published.get('architectures'))}"
        )
    said = {**published, **cast("dict[str, Any]", nested)}
    check_served(said, reasons=[f"{name} is a tensor of its own, which is not served" for name in _own_tensors(names)])
    return parse_block_config(BlockConfig, said, folder=folder, model=model, name="DFlash")


def _own_tensors(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name.startswith(_OWN)]


class DFlashDrafter(BlockDrafter):
    """Implements `Drafter` and `KvDrafter` by a DFlash folder (its option `model`).

    Raises:
        Refused: the folder is another model's.
        InvalidCheckpoint: its tensors are not right.
    """

    options: ClassVar[tuple[str, ...]] = ("model",)
    """Of `--speculative`: the folder."""

    def __init__(self, context: DrafterContext) -> None:
        asked, model = context.requirements, context.model
        if not isinstance(model, Qwen3Model) or asked is None:
            raise Refused("dflash drafts for Qwen3 models, from the folder that its option model names")
        if context.drafter_dir is None or context.weights is None:
            raise Refused(no_folder("dflash"))
        config = read_dflash(context.drafter_dir, model.config, asked.tensors)
        super().__init__(context, config, model, group=ATTENTION)

    @staticmethod
    def requirements(setting: DrafterSetting) -> DrafterRequirements:
        """Its layers of KV, and a tap after each layer that it reads.

        Raises:
            Refused: no folder, another family's model, or a folder that is another model's or not served.
            InvalidCheckpoint: its config is not valid.
        """
        folder, model = folder_and_model(setting, "dflash")
        config = read_dflash(folder, model, setting.tensors)
        tensors = block_tensors(config)
        return block_requirements(config, setting, name=ATTENTION, tensors=tensors, logits_per_draft=model.vocab_size)

    def _choose(self, hidden: Array, last_ids: Array, drafts: Array) -> None:
        del last_ids  # each place drafts by itself
        self._ops.draft_ids(self._model.logits(hidden), drafts.reshape(-1, 1), 0)
