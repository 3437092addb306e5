"""`EngineFamily`: what the entry points of all model families that this engine runs have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

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

    def __init__(self) -> None:
        """Raises `TypeError` if the definition lacks what a subclass has to say; it would be missed at a start."""
        _check(self.definition)

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


def _check(given: object) -> None:
    if not isinstance(given, ModelDefinition):
        raise TypeError(f"its definition is {given!r}, no instance of a ModelDefinition")
    definition = cast("Any", given)  # what a package of others says may be of any type
    which = type(definition).__qualname__
    missing = [name for name in ("name", "module", "config_type", "rank_sizes") if not hasattr(definition, name)]
    module = getattr(definition, "module", None)
    missing += [f"module.{name}" for name in ("tensors", "load") if not hasattr(module, name)]
    if missing:
        raise TypeError(f"{which} has no {', '.join(missing)}")
    config, sizes = definition.config_type, definition.rank_sizes
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise TypeError(f"config_type of {which} is {config!r}, no msgspec.Struct")
    if isinstance(sizes, str) or not all(hasattr(config, name) for name in sizes):
        raise TypeError(f"rank_sizes of {which} are {sizes!r}: they are a tuple of names that {config.__name__} has")
