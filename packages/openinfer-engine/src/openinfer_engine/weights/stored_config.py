"""What a checkpoint's tensors say of a model that its `config.json` does not."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from openinfer_engine.model import ModelDefinition
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.safetensors_file import TensorInfo


@runtime_checkable
class FollowsTensors(Protocol):
    """A `ModelDefinition` whose checkpoints differ in names or formats of tensors that no config tells apart."""

    def as_stored(self, config: Any, tensors: Mapping[str, TensorInfo]) -> Any:
        """The config with what the tensors say; asked before `tensors`, of every checkpoint that is opened."""
        ...


def check_stored(definition: ModelDefinition[Any], config: Any, checkpoint: Checkpoint) -> Any:
    """The config with what the checkpoint says, once both fit; raises `InvalidCheckpoint`."""
    if isinstance(definition, FollowsTensors):
        config = definition.as_stored(config, checkpoint.tensors)
    checkpoint.validate(definition.tensors(config), ignorable=definition.ignorable_tensors(config))
    return config
