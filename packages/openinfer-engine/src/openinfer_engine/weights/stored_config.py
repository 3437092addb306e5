"""What a checkpoint's tensors say of a model that its `config.json` does not."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from openinfer_engine.model import ModelDefinition
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.quantization_config import IGNORED_SUFFIXES, QuantisedConfig, as_stored
from openinfer_engine.weights.safetensors_file import TensorInfo


@runtime_checkable
class FollowsTensors(Protocol):
    """A `ModelDefinition` whose checkpoints differ in names or formats of tensors that no config tells apart."""

    def as_stored(self, config: Any, tensors: Mapping[str, TensorInfo]) -> Any:
        """The config with what the tensors say; asked before `tensors`, of every checkpoint that is opened."""
        ...


def check_stored(definition: ModelDefinition[Any], config: Any, checkpoint: Checkpoint) -> Any:
    """The config with what the checkpoint says, once both fit; raises `InvalidCheckpoint`."""
    config = config_as_stored(definition, config, checkpoint.tensors)
    ignorable = ignorable_tensors(definition, config, checkpoint.tensors)
    checkpoint.validate(definition.tensors(config), ignorable=ignorable)
    return config


def config_as_stored(definition: ModelDefinition[Any], config: Any, tensors: Mapping[str, TensorInfo]) -> Any:
    """The config with what the tensors of a checkpoint say."""
    if isinstance(definition, FollowsTensors):
        config = definition.as_stored(config, tensors)
    return as_stored(config, tensors)


def ignorable_tensors(definition: ModelDefinition[Any], config: Any, tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Names of tensors that a checkpoint of this config may have and nothing reads."""
    return {*definition.ignorable_tensors(config), *_scales_of_activations(config, tensors)}


def _scales_of_activations(config: Any, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Tensors that a quantised checkpoint may have and nothing reads."""
    if not isinstance(config, QuantisedConfig) or config.stored is None:
        return []
    return [name for name in tensors if name.endswith(IGNORED_SUFFIXES)]
