"""The contract of openinfer: what flows between a frontend, an engine, a scheduler and a model family.

Importing this package loads neither NumPy nor a network stack. Submodules hold the rest: `scheduling` (the
scheduler's contract, NumPy columns), `queue_policies`, `contracts` (their numbers), `process` (running an engine),
`simulated` (an engine without a model) and `testing` (conformance kits).
"""

from openinfer_core.engine import EngineCapability, EngineHandle, EngineInfo, EngineStats, PluginFaults, SlowCall
from openinfer_core.errors import (
    AmbiguousPlugin,
    BrokenPlugin,
    ContractMismatch,
    ContractViolation,
    EngineClosed,
    InvalidCheckpoint,
    InvalidRequest,
    MixedReleases,
    OpenInferError,
    PluginError,
    PluginFault,
    Refused,
    Unavailable,
    UnclaimedModel,
    UnknownPlugin,
)
from openinfer_core.events import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Scheduled,
    TerminalEvent,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.family import FamilyPlan, ModelFamily, RankLedger, claim, load_family, read_config
from openinfer_core.ledger import Ledger
from openinfer_core.plugins import Plugin, find_plugin, list_plugins
from openinfer_core.request import GenerateRequest, LoadedAdapter, RequestId, RetainedPrefix
from openinfer_core.sampling import Grammar, GrammarKind, Preamble, SamplingParams

__all__ = [
    "AmbiguousPlugin",
    "BrokenPlugin",
    "ContractMismatch",
    "ContractViolation",
    "EngineCapability",
    "EngineClosed",
    "EngineHandle",
    "EngineInfo",
    "EngineStats",
    "Failed",
    "FailureKind",
    "FamilyPlan",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "Grammar",
    "GrammarKind",
    "InvalidCheckpoint",
    "InvalidRequest",
    "Ledger",
    "LoadedAdapter",
    "MixedReleases",
    "ModelFamily",
    "OpenInferError",
    "Plugin",
    "PluginError",
    "PluginFault",
    "PluginFaults",
    "Preamble",
    "RankLedger",
    "Refused",
    "RequestId",
    "RetainedPrefix",
    "SamplingParams",
    "Scheduled",
    "SlowCall",
    "TerminalEvent",
    "TokenEvent",
    "TokenLogprobs",
    "Tokens",
    "Unavailable",
    "UnclaimedModel",
    "UnknownPlugin",
    "claim",
    "find_plugin",
    "list_plugins",
    "load_family",
    "read_config",
]
