"""`EngineFamily`: what the entry points of all model families that this engine runs have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from openinfer_core import EngineHandle, FamilyPlan
from openinfer_core.errors import ContractViolation
from openinfer_engine.launch import launch, plan, plan_for_gpu
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions


class EngineFamily:
    """Implements `openinfer_core.ModelFamily` for a family that brings a definition.

    Its subclass is what the entry point in `openinfer.models` names; the name there is the definition's.
    """

    definition: ClassVar[ModelDefinition[Any]]
    """What the engine, also in a process of its own, builds the model from."""

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def options_type(self) -> type[EngineOptions]:
        return EngineOptions

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        return self.definition.refusal(config)

    def plan(self, model_dir: Path, options: msgspec.Struct) -> FamilyPlan:
        """What `launch` would do; see `openinfer_engine.plan`.

        Raises:
            ContractViolation: the options are not the engine's.
        """
        return plan(self.definition, model_dir, _own(options))

    def plan_for_gpu(self, model_dir: Path, options: msgspec.Struct, *, gpu: str) -> FamilyPlan:
        """See `openinfer_engine.launch.plan_for_gpu`.

        Raises:
            ContractViolation: the options are not the engine's.
        """
        return plan_for_gpu(self.definition, model_dir, _own(options), gpu=gpu)

    def launch(self, model_dir: Path, options: msgspec.Struct) -> EngineHandle:
        """The running engine; see `openinfer_engine.launch`.

        Raises:
            ContractViolation: the options are not the engine's.
        """
        return launch(self.definition, model_dir, _own(options))


def _own(options: msgspec.Struct) -> EngineOptions:
    if not isinstance(options, EngineOptions):
        raise ContractViolation(
            f"the options of this family are {EngineOptions.__name__}, not {type(options).__name__}"
        )
    return options
