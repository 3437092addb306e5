"""Model folders, engines and servers for the tests."""

import asyncio
import contextlib
import http.client
import importlib
import importlib.util
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import openai
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.testing import ParrotLoop, ThreadedServer

CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome. ",
    "Once upon a time there was a small stone that wanted to be a mountain. ",
    "naïve café — “quotes” … 東京 is in 日本. Привет мир! 🙂🙃 👩‍👩‍👧‍👦 ",
    "def f(x):\n    return x + 1\n\n\n",
]
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>{% endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}<think></think>{%- endif -%}{%- endif -%}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<a token>", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """In the manner of SentencePiece: spaces are part of words, unknown characters are bytes."""
    words = ["▁", "▁the", "▁stone", "▁is", "▁Paris", "Paris", "a", "b", "c", ".", "▁a", "é"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> tokenizers.Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> tokenizers.Tokenizer:
    return byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: tokenizers.Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def info(tokenizer: tokenizers.Tokenizer) -> EngineInfo:
    return EngineInfo(
        model="parrot",
        family="birds",
        max_model_tokens=2048,
        num_token_ids=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
        block_size_tokens=16,
        num_blocks=64,
        max_num_seqs=64,
        max_waiting=256,
        memory_bytes={"kv_cache": 4096},
    )


def counted(protocol: type, sndbuf: int | None) -> tuple[type, set[asyncio.Protocol]]:
    """The protocol, and the set of its connections that are open; with small buffers in the kernel if asked for."""
    connections: set[asyncio.Protocol] = set()

    class Counted(protocol):
        def connection_made(self, transport) -> None:
            connections.add(self)
            if sndbuf is not None:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
            super().connection_made(transport)

        def connection_lost(self, exc) -> None:
            connections.discard(self)
            super().connection_lost(exc)

    return Counted, connections


@pytest.fixture
def start(model_dir: Path) -> Iterator[Callable[..., ThreadedServer]]:
    """Starts servers that end with the test."""
    with ExitStack() as servers:

        def start_one(
            loop: ParrotLoop,
            options: ServerOptions | None = None,
            folder: Path = model_dir,
            protocol: type | None = None,
            loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
            sndbuf: int | None = None,
        ) -> ThreadedServer:
            options = options or ServerOptions(port=0)
            protocol, connections = counted(protocol or bounded_protocol(options), sndbuf)
            server = ThreadedServer(loop, folder, options, protocol=protocol, loop_factory=loop_factory)
            server.connections = connections
            return servers.enter_context(server)

        yield start_one


def ways() -> dict[str, dict[str, object]]:
    """How bytes get to a client: into the transport, through `send`, into uvloop's transport (where it exists)."""
    several: dict[str, dict[str, object]] = {"direct": {}, "send": {"protocol": HttpToolsProtocol}}
    if importlib.util.find_spec("uvloop") is not None:
        several["uvloop"] = {"loop_factory": importlib.import_module("uvloop").new_event_loop}
    return several


@pytest.fixture(params=ways().values(), ids=ways().keys())
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    """Arguments of `start`."""
    return request.param


@pytest.fixture(scope="module", params=ways().values(), ids=ways().keys())
def every_way(
    request: pytest.FixtureRequest, model_dir: Path, info: EngineInfo
) -> Iterator[tuple[ThreadedServer, ParrotLoop]]:
    """One server per module and way."""
    parrot = ParrotLoop(info)
    with ThreadedServer(parrot, model_dir, ServerOptions(port=0), **request.param) as server:
        yield server, parrot


@pytest.fixture(scope="module")
def shared(model_dir: Path, info: EngineInfo) -> Iterator[ThreadedServer]:
    """One server per module."""
    with ThreadedServer(ParrotLoop(info), model_dir, ServerOptions(port=0)) as server:
        yield server


@pytest.fixture
def connect() -> Iterator[Callable[[ThreadedServer], openai.OpenAI]]:
    """SDK clients that are closed with the test."""
    with ExitStack() as clients:

        def connect_one(server: ThreadedServer) -> openai.OpenAI:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)
            return clients.enter_context(client)

        yield connect_one


@pytest.fixture
def call() -> Callable[..., tuple[int, dict[str, str], bytes]]:
    """One request over a connection of its own: status, headers, body."""

    def call_once(
        server: ThreadedServer,
        method: str,
        path: str,
        body: object = None,
        content_type: str | None = "application/json",
        further_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            headers = {} if content_type is None or body is None else {"content-type": content_type}
            connection.request(method, path, body=data, headers={**headers, **further_headers})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    return call_once


@pytest.fixture
def post_error(shared: ThreadedServer, call) -> Callable[..., tuple[int, dict[str, object]]]:
    """Posts what must be refused: status and the error object."""

    def post(path: str, body: object, **further: object) -> tuple[int, dict[str, object]]:
        status, headers, answer = call(shared, "POST", path, body, **further)
        assert headers["content-type"] == "application/json"
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    return post
