"""No chat without `max_tokens` is refused by the engine that it is for: published configs, GPU sizes.

What the server would ask of the engine is given to the scheduler that the plan names, with the pool that the plan has.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openinfer.models import find_family
from openinfer_core import Refused
from openinfer_core.events import Failed
from openinfer_engine import EngineOptions
from openinfer_engine.backends import open_backend
from openinfer_engine.cuda.named_gpus import NAMED_GPUS, NamedGpuBackend
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_server import ServerOptions
from openinfer_server.limits.budgets import Budgets
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.request.generation_fields import GenerationFields
from openinfer_server.request.plan import Prompt, Scoring, make_plan
from openinfer_server.service import Service

PUBLISHED = json.loads((Path(__file__).parent / "fixtures/published_shapes.json").read_text())["served"]
MOST_PARAMETERS = 100e9  # of one GPU
SHAPES = [each for each in PUBLISHED if each["parameters"] < MOST_PARAMETERS]
DUMMY = {"load_format": LoadFormat.DUMMY}
GPUS = ("l4-24g", "rtx4090-24g", "rtx5090-32g", "l40s-48g", "h100-80g", "b200-180g")
CHATS_AT_ONCE = 32
KINDS = [(1, None), (1, 20), (8, 0), (8, 20)]  # n, top_logprobs


def plans(config: dict[str, Any], folder: Path) -> Iterator[tuple[str, EnginePlan]]:
    """On a CPU, and on every GPU of these sizes that holds the model."""
    (folder / "config.json").write_text(json.dumps(config))
    definition = find_family(folder)[0].definition  # type: ignore[attr-defined]
    cpu = EngineOptions(device=DeviceKind.CPU, **DUMMY)
    yield "cpu", resolve(definition, folder, cpu, backend=open_backend(cpu))
    cuda = EngineOptions(device=DeviceKind.CUDA, **DUMMY)
    for name in GPUS:
        try:
            yield name, resolve(definition, folder, cuda, backend=NamedGpuBackend(NAMED_GPUS[name], cuda))
        except Refused:
            continue


def server_of(plan: EnginePlan) -> Service:
    handle: Any = SimpleNamespace(info=plan.info)
    metrics = ServerMetrics(max_model_tokens=plan.info.max_model_tokens)
    options = ServerOptions()
    return Service(
        options,
        EngineLink(handle, metrics),
        metrics,
        tokenizer=None,  # type: ignore[arg-type] # no text is asked about
        template=None,
        budgets=Budgets.of(options),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["name"])
def test_context_is_what_the_pool_holds_and_no_default_chat_is_refused(shape: dict[str, Any], tmp_path: Path) -> None:
    for device, plan in plans(shape["config"], tmp_path):
        served, blocks_for = plan.info.max_model_tokens, plan.layouts[0].blocks_for_context
        assert blocks_for(served) <= plan.num_blocks, device
        is_whole = served == shape["context_tokens"]
        assert is_whole or blocks_for(served + plan.info.block_size_tokens) > plan.num_blocks, device
        assert (plan.clipped_context is None) == is_whole
        service, scheduler = server_of(plan), plan.make_scheduler()
        chats = itertools.islice(itertools.cycle(KINDS), CHATS_AT_ONCE)
        for number, (n, top_logprobs) in enumerate(chats):
            prompt = Prompt(tuple(range(number + 1)), "", "messages")
            fields = GenerationFields(n=n)
            asked = make_plan(
                service, fields, [prompt], tenant="", owner="", max_tokens=None, scoring=Scoring(output=top_logprobs)
            )
            assert len(asked.requests) == n
            events = [event for request in asked.requests for event in scheduler.add(request, now_s=0.0)]
            assert not [event for event in events if isinstance(event, Failed)], (device, n, top_logprobs)


def test_a_chat_without_scores_may_fill_the_context(tmp_path: Path) -> None:
    shape = next(each for each in SHAPES if each["name"] == "Qwen3-32B")
    plan = dict(plans(shape["config"], tmp_path))["h100-80g"]
    served = plan.info.max_model_tokens
    assert 29_000 < served < 31_000
    asked = make_plan(
        server_of(plan),
        GenerationFields(),
        [Prompt((1, 2, 3), "", "messages")],
        tenant="",
        owner="",
        max_tokens=None,
        scoring=Scoring(),
    )
    assert asked.requests[0].sampling.max_tokens == served - 3
