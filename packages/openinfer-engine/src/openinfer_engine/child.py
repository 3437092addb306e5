"""The engine process of a model family: `python -m openinfer_engine.child`, started by `launch`."""

from pathlib import Path

import msgspec

from openinfer_core import find_plugin
from openinfer_core.engine_process import run_engine_process
from openinfer_core.plugins import MODELS
from openinfer_engine.composition import resolve
from openinfer_engine.launch import EngineSpec, build_loop
from openinfer_engine.loop import StepLoop


def build(raw: msgspec.Raw) -> StepLoop:
    """Builds the engine that a spec describes."""
    spec = msgspec.json.decode(raw, type=EngineSpec)
    found = find_plugin(MODELS, spec.family).load()
    family = found() if isinstance(found, type) else found
    options = msgspec.json.decode(spec.options, type=family.options_type)
    return build_loop(resolve(family.definition, Path(spec.model_dir), options))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(build))
