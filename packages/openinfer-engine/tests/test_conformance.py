"""The engine kit of the contract on the real engine, in a thread and in a process of its own."""

from collections.abc import Callable

import pytest

from openinfer_core import EngineHandle, find_plugin
from openinfer_core.testing.engine import ENGINE_CHECKS
from openinfer_engine import EngineOptions, LoopHost


def make_engine(host: LoopHost) -> EngineHandle:
    """The tiny model with few blocks, so that requests also wait and are preempted."""
    family = find_plugin("openinfer.models", "qwen3").load()()
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    options = EngineOptions(engine_host=host, num_blocks=256, max_num_seqs=32, max_step_tokens=256)
    return family.launch(model_dir, options)


@pytest.mark.parametrize("host", list(LoopHost))
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_engine_keeps_the_contract(
    check: Callable[[Callable[[], EngineHandle]], None], host: LoopHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    check(lambda: make_engine(host))
