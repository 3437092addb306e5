"""The engine process of a model family: `python -m openinfer_engine.child`, started by `launch`."""

import sys
from pathlib import Path

import msgspec

from openinfer_core.contracts import one_release
from openinfer_core.process.engine_process import run_engine_process
from openinfer_core.process.host import EngineLoop
from openinfer_core.process.timeline import Timeline
from openinfer_engine.engine_plan import resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.guard.family_faults import named_faults
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.worker.process_group import start_workers

# how long a thread of this process keeps the interpreter from another one that wants it. The thread that launches a
# step gives it away at each of hundreds of launches. At Python's 5 ms, a burst of requests, which other threads decode
# and queue, made launching such a step take 60 ms instead of 8 ms
SWITCH_INTERVAL_S = 2e-5


def build(raw: msgspec.Raw) -> EngineLoop:
    with one_release():
        return _build(raw)


def _build(raw: msgspec.Raw) -> EngineLoop:
    spec, timeline = msgspec.json.decode(raw, type=EngineSpec), Timeline()
    definition, options = spec.read()
    processes = start_workers(spec, options)  # they import and open their devices while this goes on
    try:
        timeline.mark("imports")
        placement = None if processes is None else processes.placement
        with named_faults(definition):
            engine_plan = resolve(definition, Path(spec.model_dir), options, timeline=timeline, placement=placement)
    except BaseException:
        if processes is not None:
            processes.close(deadline_s=0)
        raise
    return build_engine_loop(engine_plan, processes)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise SystemExit(run_engine_process(build))
