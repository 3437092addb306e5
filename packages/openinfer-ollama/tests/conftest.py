"""A server whose model says what the test wrote, and Ollama's official client."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from openinfer_core.engine import EngineInfo
from openinfer_core.request import GenerateRequest
from openinfer_server import ServerOptions, Tokenizer
from openinfer_server.testing import ScriptedLoop, ThreadedServer
from openinfer_tiny_model import model_dir

CONTEXT_TOKENS = 512


class Words:
    """What a model says, whatever it is asked: a script for `ScriptedLoop`."""

    def __init__(self, tokenizer: Tokenizer, *, end: int) -> None:
        self.text = ""
        self._end = end
        self._tokenizer = tokenizer

    def __call__(self, request: GenerateRequest) -> list[int]:
        """Encodes the text."""
        del request
        return [*self._tokenizer.encode_short(self.text), self._end]


class Bench:
    """One server, what its model says, and who asks.

    Attributes:
        server: see there.
        loop: its engine.
        words: what it says.
        client: the official client.
        http: for what the official client cannot send.
    """

    def __init__(self, server: ThreadedServer, loop: ScriptedLoop, words: Words, tokenizer: Tokenizer) -> None:
        self.server = server
        self.loop = loop
        self.words = words
        self.client = ollama.Client(host=server.url, timeout=20)
        self.http = httpx.Client(base_url=server.url, timeout=20)
        self._tokenizer = tokenizer

    @property
    def asked(self):
        """What the engine was last asked."""
        return self.server.engine.submitted[-1]

    @property
    def prompt(self) -> str:
        """What the engine was last asked to continue, special tokens by name."""
        return self._tokenizer.decode_prompt(self.asked.prompt_token_ids)

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.json()

    def refusal(self, path: str, **body: Any) -> str:
        status, answer = self.post(path, **{"model": "parrot", **body})
        assert status == 400
        assert answer.keys() == {"error"}
        return answer["error"]


@pytest.fixture(scope="session")
def info() -> EngineInfo:
    return EngineInfo(
        model="parrot",
        family="birds",
        max_model_tokens=CONTEXT_TOKENS,
        num_token_ids=2040,
        eos_token_ids=(1,),
        block_size_tokens=16,
        num_blocks=64,
        max_num_seqs=8,
        max_waiting=8,
        memory_bytes={"weights": 123_456},
    )


@pytest.fixture(scope="module")
def bench(info: EngineInfo) -> Iterator[Bench]:
    tokenizer = Tokenizer.load(model_dir(), num_token_ids=info.num_token_ids)
    words = Words(tokenizer, end=info.eos_token_ids[0])
    loop = ScriptedLoop(info, words)
    options = ServerOptions(port=0, endpoints=("ollama",), model_name=["parrot", "birds/parrot:7b"])
    with ThreadedServer(loop, model_dir(), options) as server:
        bench = Bench(server, loop, words, tokenizer)
        with bench.http:
            yield bench
        bench.client.close()
    tokenizer.close()


@pytest.fixture
def says(bench: Bench) -> Callable[[str], None]:
    """Sets what the model says."""

    def say(text: str) -> None:
        bench.words.text = text

    return say
