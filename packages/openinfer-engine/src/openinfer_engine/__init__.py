"""The engine: scheduler, step loop, runner, checkpoint reader, ranks. A model family launches it.

`launch` and `plan` are what a family calls; `StepLoop` is the engine without a host; `TokenBudgetScheduler` is the
default scheduler, found through the entry-point group `openinfer.schedulers`.
"""

from openinfer_engine.checkpoint import Checkpoint, RankWeights
from openinfer_engine.communicator import Communicator, SoloCommunicator
from openinfer_engine.composition import Composition, resolve
from openinfer_engine.dummy import DummyWeights
from openinfer_engine.errors import GroupBroken
from openinfer_engine.launch import build_loop, launch, plan
from openinfer_engine.local_group import LocalGroup
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import Cut, Model, ModelDefinition, ModelLimits, WeightSource
from openinfer_engine.options import EngineHost, EngineOptions, LoadFormat
from openinfer_engine.scheduler import TokenBudgetScheduler

__all__ = [
    "Checkpoint",
    "Communicator",
    "Composition",
    "Cut",
    "DummyWeights",
    "EngineHost",
    "EngineOptions",
    "GroupBroken",
    "LoadFormat",
    "LocalGroup",
    "Model",
    "ModelDefinition",
    "ModelLimits",
    "RankWeights",
    "SoloCommunicator",
    "StepLoop",
    "TokenBudgetScheduler",
    "WeightSource",
    "build_loop",
    "launch",
    "plan",
    "resolve",
]
