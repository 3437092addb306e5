"""Requests that give no sampling parameters get the model's own, on every route that makes text of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from openinfer_core.sampling_defaults import SamplingDefaultsFrom
from openinfer_server import ServerOptions
from openinfer_server.plan_parts import frontend_parts
from openinfer_server.testing import ParrotLoop, ThreadedServer

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
TURNS = [{"role": "user", "content": "a"}]
ROUTES = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 4}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 4}),
]


@pytest.fixture
def model(tmp_path: Path, model_dir: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **DEFAULTS}))
    return folder


@pytest.fixture
def sampled(start, call, info, model) -> Callable[..., dict[str, float]]:
    def sample(path: str, body: object, **options: object) -> dict[str, float]:
        server: ThreadedServer = start(ParrotLoop(info), ServerOptions(port=0, **options), folder=model)
        status, _, answer = call(server, "POST", path, body)
        assert status == 200, answer
        sampling = server.engine.submitted[-1].sampling
        return {name: getattr(sampling, name) for name in DEFAULTS}

    return sample


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_that_makes_text_samples_as_the_model_says(sampled, path, body):
    assert sampled(path, body) == DEFAULTS
    assert sampled(path, {**body, "temperature": 0.3}) == DEFAULTS | {"temperature": 0.3}


def test_given_values_switch_the_models_off(sampled):
    given = {"temperature": 1, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
    assert sampled("/v1/completions", {"prompt": "a", **given}) == given | {"top_k": 0}


def test_without_the_models_defaults_the_distribution_is_the_models_own(sampled):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    options = {"sampling_defaults": SamplingDefaultsFrom.NONE}
    assert sampled("/v1/completions", {"prompt": "a"}, **options) == plain


def test_generating_by_tokens_takes_no_defaults(sampled):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}
    assert sampled("/inference/v1/generate", body) == plain


def test_a_response_says_what_it_was_sampled_with(start, call, info, model):
    server = start(ParrotLoop(info), folder=model)
    _, _, answer = call(server, "POST", "/v1/responses", {"input": "a", "max_output_tokens": 4, "top_p": 0.5})
    assert {name: json.loads(answer)[name] for name in ("temperature", "top_p")} == {"temperature": 0.6, "top_p": 0.5}


def test_models_and_plan_show_the_defaults(start, call, info, model):
    server = start(ParrotLoop(info), folder=model)
    (card,) = json.loads(call(server, "GET", "/v1/models")[2])["data"]
    assert card["sampling_defaults"] == DEFAULTS
    parts = frontend_parts(model, "birds", ServerOptions())
    assert parts["sampling_defaults"] == "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05"
