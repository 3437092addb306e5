"""Adapters with random factors of a model with random weights, for tools that measure engines with adapters."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openinfer_core import claim, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing.adapters import write_adapter


@dataclass(frozen=True, slots=True)
class MadeAdapters:
    """Adapters of all projections, each in a folder of its name below `folder`."""

    definition: ModelDefinition[Any]
    folder: Path
    names: list[str]

    @property
    def flags(self) -> list[str]:
        """Of `--lora`."""
        return [f"{name}={self.folder / name}" for name in self.names]


@contextmanager
def made_adapters(model: Path, *, count: int, rank: int) -> Iterator[MadeAdapters]:
    """In memory, until the end.

    Args:
        model: a folder with a config.json.
        count: of adapters.
        rank: of each.
    """
    config = read_config(model)
    family: Any = claim(config, list_plugins(MODELS))[0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        adapters = MadeAdapters(family.definition, Path(made), [f"adapter-{number}" for number in range(count)])
        for seed, name in enumerate(adapters.names):
            write_adapter(adapters.folder / name, family.definition, config, rank=rank, seed=seed)
        yield adapters
