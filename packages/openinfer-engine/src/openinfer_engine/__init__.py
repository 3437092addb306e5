"""The engine: scheduler, step loop, runner, checkpoint reader, ranks. A model family launches it.

`EngineFamily` is what a family's entry point is made of, `launch` and `plan` what it calls; `StepLoop` is the engine
without a host; `TokenBudgetScheduler` is the default scheduler, found through the group `openinfer.schedulers`.
"""

from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.drafting import Drafter, DrafterContext, DrafterFactory
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.errors import GroupBroken
from openinfer_engine.family import EngineFamily
from openinfer_engine.launch import build_loop, launch, plan
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import Model, ModelDefinition, ModelLimits, Shard, WeightSource
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.ranks.contract import RankHost, RankHostFactory, RankLink, RankSpec
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DummyWeights

__all__ = [
    "Checkpoint",
    "Communicator",
    "Drafter",
    "DrafterContext",
    "DrafterFactory",
    "DummyWeights",
    "EngineFamily",
    "EngineOptions",
    "EnginePlan",
    "GroupBroken",
    "LoadFormat",
    "LocalGroup",
    "LoopHost",
    "Model",
    "ModelDefinition",
    "ModelLimits",
    "Placement",
    "RankHost",
    "RankHostFactory",
    "RankLink",
    "RankPlace",
    "RankSpec",
    "RankWeights",
    "Shard",
    "SoloCommunicator",
    "StepLoop",
    "TokenBudgetScheduler",
    "WeightSource",
    "build_loop",
    "launch",
    "plan",
    "resolve",
]
