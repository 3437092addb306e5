"""A server whose model says what the test wrote, with a chat template that knows tools and thinking."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import openai
import pytest
import tokenizers

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ScriptedLoop, ThreadedServer

AGENT_TEMPLATE = (
    "{%- for document in documents or [] %}{{ '<|im_start|>document\n' + document.text + '<|im_end|>\n' }}{% endfor -%}"
    "{%- if tools -%}{{ '<|im_start|>system\n# Tools\n' }}"
    "{%- for tool in tools %}{{ tool | tojson }}\n{% endfor -%}"
    "{{ 'Call as <tool_call>{...}</tool_call><|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class SayingLoop(ScriptedLoop):
    """Says a text and ends.

    Attributes:
        says: what every request is answered with.
    """

    def __init__(self, info: EngineInfo, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__(info, lambda _: (*tokenizer.encode(self.says).ids, *info.eos_token_ids))
        self.says = ""


class Agent:
    """One server and its clients.

    Attributes:
        server: see there.
        loop: what the model says.
        openai: the official client.
        anthropic: the official client.
    """

    def __init__(self, server: ThreadedServer, loop: SayingLoop, tokenizer: tokenizers.Tokenizer) -> None:
        self.server = server
        self.loop = loop
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20)
        self._tokenizer = tokenizer

    @property
    def sampling(self):
        """What the engine was last asked to sample."""
        return self.server.engine.submitted[-1].sampling

    @property
    def prompt(self) -> str:
        """What the engine was last asked to continue."""
        ids = self.server.engine.submitted[-1].prompt_token_ids
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def close(self) -> None:
        """Closes the clients."""
        self.openai.close()
        self.anthropic.close()


@pytest.fixture(scope="session")
def agent_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: tokenizers.Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": AGENT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def served(folder: Path, info: EngineInfo, tokenizer: tokenizers.Tokenizer) -> Iterator[Agent]:
    """A server of a model folder, and its clients."""
    loop = SayingLoop(info, tokenizer)
    with ThreadedServer(loop, folder, ServerOptions(port=0, model_name=["parrot", "bird"])) as server:
        agent = Agent(server, loop, tokenizer)
        yield agent
        agent.close()


@pytest.fixture(scope="module")
def agent(agent_dir: Path, info: EngineInfo, tokenizer: tokenizers.Tokenizer) -> Iterator[Agent]:
    with served(agent_dir, info, tokenizer) as agent:
        yield agent


MODEL_DEFAULTS = {
    "none": {},
    "sampled": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
    "greedy": {"do_sample": False, "min_p": 0.1},
}


@pytest.fixture(scope="module", params=MODEL_DEFAULTS)
def agent_with_defaults(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    agent_dir: Path,
    info: EngineInfo,
    tokenizer: tokenizers.Tokenizer,
) -> Iterator[Agent]:
    """An agent whose model would have its requests sampled in several ways."""
    folder = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(agent_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps(MODEL_DEFAULTS[request.param]))
    with served(folder, info, tokenizer) as agent:
        yield agent


@pytest.fixture
def says(agent: Agent) -> Callable[[str], None]:
    """Sets what the model says."""

    def say(text: str) -> None:
        agent.loop.says = text

    return say
