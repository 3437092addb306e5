"""Dynamo's contract of backends, transcribed from ai-dynamo 1.6.1, for tests where Dynamo is not installed.

`dynamo/common/backend/engine.py` (`EngineConfig`, `LlmRegistration`), `publisher.py` (`ZmqSource`,
`ComponentSnapshot`), `health_check.py`, `dynamo/llm/exceptions.py` and `Context` of `dynamo/_core.pyi`.
`test_dynamo_runtime.py` has the real ones, where they are installed.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from openinfer_core import FailureKind
from openinfer_dynamo.dynamo_api import DynamoApi


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    enable_eagle: bool = False
    max_gpu_lora_count: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None
    model_aliases: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


class DynamoError(Exception):
    """One class stands for `dynamo.llm.exceptions`; its kind for the class."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _failure(kind: FailureKind) -> Any:
    return lambda message: DynamoError(kind, message)


def build_health_check_payload(bos_token_id: int) -> dict[str, Any]:
    return {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }


API = DynamoApi(
    engine_config=EngineConfig,
    llm_registration=LlmRegistration,
    zmq_source=ZmqSource,
    component_snapshot=ComponentSnapshot,
    probe=build_health_check_payload,
    failure={kind: _failure(kind) for kind in FailureKind},
)


class Context:
    """A request's, which its client may leave."""

    def __init__(self, name: str = "a", headers: dict[str, str] | None = None) -> None:
        self._name = name
        self._headers = headers
        self._stopped = asyncio.Event()

    def id(self) -> str:
        return self._name

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop_generating(self) -> None:
        self._stopped.set()

    def trace_headers(self) -> dict[str, str] | None:
        return self._headers

    async def async_killed_or_stopped(self) -> bool:
        return await self._stopped.wait()
