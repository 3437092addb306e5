"""The engine process of a model family: `python -m openinfer_engine.child`, started by `launch`."""

from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import find_plugin, load_family
from openinfer_core.engine_process import run_engine_process
from openinfer_core.plugins import MODELS
from openinfer_core.timeline import Timeline
from openinfer_engine.composition import resolve
from openinfer_engine.launch import EngineSpec, build_loop
from openinfer_engine.loop import StepLoop


def build(raw: msgspec.Raw) -> StepLoop:
    """Builds the engine that a spec describes; the timeline of its start begins with this process."""
    timeline = Timeline()
    spec = msgspec.json.decode(raw, type=EngineSpec)
    family: Any = load_family(find_plugin(MODELS, spec.family))
    options = msgspec.json.decode(spec.options, type=family.options_type)
    timeline.mark("imports")
    return build_loop(resolve(family.definition, Path(spec.model_dir), options, timeline=timeline))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(build))
