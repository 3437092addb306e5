"""`KimiK2`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import EngineHandle, FamilyPlan
from openinfer_core.errors import ContractViolation
from openinfer_engine.launch import launch, plan
from openinfer_engine.options import EngineOptions
from openinfer_kimi_k2.definition import KimiK2Definition
from openinfer_kimi_k2.refusals import refusal


class KimiK2:
    """Implements `openinfer_core.ModelFamily` for all text models of Kimi-K2."""

    definition = KimiK2Definition()
    """What the engine, also in a process of its own, builds the model from."""

    @property
    def name(self) -> str:
        """`kimi_k2`."""
        return self.definition.name

    @property
    def options_type(self) -> type[EngineOptions]:
        """The engine's options; this family adds none."""
        return EngineOptions

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

    def plan(self, model_dir: Path, options: msgspec.Struct) -> FamilyPlan:
        """What `launch` would do; see `openinfer_engine.plan`."""
        return plan(self.definition, model_dir, _own(options))

    def launch(self, model_dir: Path, options: msgspec.Struct) -> EngineHandle:
        """The running engine; see `openinfer_engine.launch`."""
        return launch(self.definition, model_dir, _own(options))


def _own(options: msgspec.Struct) -> EngineOptions:
    if not isinstance(options, EngineOptions):
        raise ContractViolation(
            f"the options of this family are {EngineOptions.__name__}, not {type(options).__name__}"
        )
    return options
