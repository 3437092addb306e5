"""`openinfer simulate fit`: measures what computing on the host takes here, and writes the table of `cpu.py`.

Each figure is the least of several repetitions, which is what an undisturbed processor takes. What depends on a size
is measured at two of them, and the table has the line through both.
"""

import argparse
import asyncio
import http.client
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httptools
import msgspec
import numpy as np

from openinfer.models import find_model_dir
from openinfer_bench.scheduler_timing import measure_scheduler
from openinfer_bench.simulate.cpu import TABLE, CpuTimes, FittedTable
from openinfer_core import GenerateRequest, RequestId, SamplingParams, read_config
from openinfer_core.engine import EngineInfo
from openinfer_core.grammars import GrammarCompiler, Vocabulary, mask_words
from openinfer_core.provenance import provenance
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.choice import llguidance_compiler
from openinfer_engine.grammars.matcher import PER_TOKEN_S
from openinfer_engine.vocabulary import read_eos_token_ids, read_num_token_ids
from openinfer_server import Tokenizer
from openinfer_server.http.sliced_json import SLICE_BYTES, decode_body
from openinfer_server.options import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer
from openinfer_server.tokens.types import TokenRequest

_REPEATS = 7
_FEW_ROWS, _MANY_ROWS = 4, 128
_FEW_PROPERTIES, _MANY_PROPERTIES = 4, 400
_WALK_TOKENS = 100
_REQUESTS, _STREAMED_TOKENS = 100, 400
_STEP_S = 0.001  # so that each token of a stream is a wake-up of its own
_COMPILE_S = 120.0
_MEMORY_BYTES = 64 * 2**20
_ANY_OBJECT = '{"type": "object"}'


def run(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes it."""
    arguments = _parser().parse_args(argv)
    table = FittedTable(machine=_machine(), commit=provenance().commit, times=measure())
    text = json.dumps(msgspec.to_builtins(table), indent=2) + "\n"
    Path(arguments.output).write_text(text)
    sys.stdout.write(text)
    return 0


def measure() -> CpuTimes:
    """The times of this machine."""
    callback_s, request_s = _server_times()
    plan_s, planned_row_s = _plan_times()
    compile_s, compiled_character_s, mask_s = _grammar_times()
    times = CpuTimes(
        callback_s=callback_s,
        request_s=request_s,
        received_byte_s=_received_byte_s(),
        json_byte_s=_json_byte_s(),
        encoded_character_s=_encoded_character_s(),
        plan_s=plan_s,
        planned_row_s=planned_row_s,
        compile_s=compile_s,
        compiled_character_s=compiled_character_s,
        mask_s=mask_s,
        costly_mask_s=PER_TOKEN_S,
        memory_bytes_per_s=_memory_bytes_per_s(),
    )
    return msgspec.convert({name: float(f"{getattr(times, name):.3g}") for name in times.__struct_fields__}, CpuTimes)


def _machine() -> str:
    return f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}"


def _least_s(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Of processor time, so that other processes count as little as possible."""

    def once() -> float:
        begin_s = time.thread_time()
        work()
        return time.thread_time() - begin_s

    return min(once() for _ in range(repeats))


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Where the line through two points meets the axis, and its slope; neither below nothing."""
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    return max(0.0, first[1] - slope * first[0]), slope


# --- the server's process -----------------------------------------------------------------------------------


class _CountingLoop(asyncio.SelectorEventLoop):
    """Counts callbacks as `VirtualEventLoop` does, and the processor time of its thread."""

    num_callbacks = 0
    cpu_s = 0.0

    def _run_once(self) -> None:
        self.num_callbacks += max(1, len(self._ready))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self.cpu_s = time.thread_time()


def _server_times() -> tuple[float, float]:
    """Seconds of a callback, by a long stream, and what a request takes besides its callbacks."""
    loops: list[_CountingLoop] = []

    def make_loop() -> asyncio.AbstractEventLoop:
        loops.append(_CountingLoop())
        return loops[0]

    info = EngineInfo(
        model="fit",
        family="tiny",
        max_model_tokens=2 * _STREAMED_TOKENS,
        num_token_ids=2048,
        eos_token_ids=(),
        block_size_tokens=16,
        num_blocks=1024,
        max_num_seqs=8,
        max_waiting=8,
    )
    options = ServerOptions(port=0, model_name=["fit"])
    with ThreadedServer(
        ParrotLoop(info, step_s=_STEP_S), find_model_dir("tiny"), options, loop_factory=make_loop
    ) as server:
        connection = http.client.HTTPConnection(*server.address)

        def ask(max_tokens: int, *, stream: bool) -> None:
            body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": max_tokens}}
            connection.request("POST", "/inference/v1/generate", json.dumps({**body, "stream": stream}), _JSON)
            response = connection.getresponse()
            response.read()

        def spent(work: Callable[[], None]) -> tuple[float, int]:
            (loop,) = loops
            cpu_s, callbacks = loop.cpu_s, loop.num_callbacks
            work()
            return loop.cpu_s - cpu_s, loop.num_callbacks - callbacks

        def many_requests() -> None:
            for _ in range(_REQUESTS):
                ask(1, stream=False)

        many_requests()
        streamed_s, callbacks = min(spent(lambda: ask(_STREAMED_TOKENS, stream=True)) for _ in range(_REPEATS))
        callback_s = streamed_s / callbacks
        requests_s, callbacks = min(spent(many_requests) for _ in range(_REPEATS))
        connection.close()
    return callback_s, max(0.0, requests_s - callbacks * callback_s) / _REQUESTS


_JSON = {"content-type": "application/json"}


def _received_byte_s() -> float:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1048576\r\n\r\n"

    class Body:
        def on_body(self, data: bytes) -> None:
            parts.append(data)

    parts: list[bytes] = []

    def receive() -> None:
        parser = httptools.HttpRequestParser(Body())
        parser.feed_data(head)
        for _ in range(16):
            parser.feed_data(bytes(65536))
        b"".join(parts)
        parts.clear()

    return _least_s(receive) / 2**20


def _json_byte_s() -> float:
    decoder = msgspec.json.Decoder(TokenRequest)

    def body_of(size: int) -> bytes:
        return json.dumps({"token_ids": [1234] * (size // 6), "sampling_params": {"max_tokens": 1}}).encode()

    small, large = body_of(SLICE_BYTES // 2), body_of(SLICE_BYTES * 16)
    per_byte = [_least_s(lambda body=body: decode_body(decoder, body)) / len(body) for body in (small, large)]
    return max(per_byte)


def _encoded_character_s() -> float:
    tokenizer = Tokenizer.load(find_model_dir("tiny"))
    text = "the quick brown fox jumps over 12 lazy dogs; " * 400
    try:
        return _least_s(lambda: tokenizer.encode_short(text)) / len(text)
    finally:
        tokenizer.close()


# --- the engine's process -----------------------------------------------------------------------------------


def _plan_times() -> tuple[float, float]:
    few, many = (measure_scheduler(rows=rows, steps=200) for rows in (_FEW_ROWS, _MANY_ROWS))
    return _line((_FEW_ROWS, few.median_step_s), (_MANY_ROWS, many.median_step_s))


def _grammar_times() -> tuple[float, float, float]:
    """Seconds to compile a schema: of any, and of each character; and of a mask."""
    model_dir = find_model_dir("tiny")
    vocabulary = Vocabulary(
        model_dir=model_dir,
        num_token_ids=read_num_token_ids(model_dir, vocab_size=2**24),
        eos_token_ids=read_eos_token_ids(model_dir, read_config(model_dir)),
    )
    compiler = llguidance_compiler(vocabulary)
    try:
        _compile_s(compiler, vocabulary, 1, "warm")
        few, many = (
            min(_compile_s(compiler, vocabulary, count, str(turn)) for turn in range(3))
            for count in (_FEW_PROPERTIES, _MANY_PROPERTIES)
        )
        sizes = (len(_schema(_FEW_PROPERTIES, "0")), len(_schema(_MANY_PROPERTIES, "0")))
        compile_s, character_s = _line((sizes[0], few), (sizes[1], many))
        return compile_s, character_s, _mask_s(compiler, vocabulary)
    finally:
        compiler.close()


def _schema(num_properties: int, name: str) -> str:
    properties = {f"{name} {index}": {"type": ("string", "integer")[index % 2]} for index in range(num_properties)}
    return json.dumps({"type": "object", "properties": properties, "required": [*properties]})


def _request(vocabulary: Vocabulary, text: str) -> GenerateRequest:
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    sampling = SamplingParams(max_tokens=1, stop_token_ids=vocabulary.eos_token_ids, grammar=grammar)
    return GenerateRequest(request_id=RequestId(1), prompt_token_ids=(0,), sampling=sampling)


def _compile_s(compiler: GrammarCompiler, vocabulary: Vocabulary, num_properties: int, name: str) -> float:
    begin_s = time.perf_counter()
    compiler.compile(_request(vocabulary, _schema(num_properties, name))).result(_COMPILE_S)
    return time.perf_counter() - begin_s


def _mask_s(compiler: GrammarCompiler, vocabulary: Vocabulary) -> float:
    """The mean over walks of allowed tokens, which lead into parts that no mask has been made for."""
    words = np.empty(mask_words(vocabulary.num_token_ids), np.uint32)
    draw, taken_s = np.random.default_rng(0), list[float]()
    for _ in range(_REPEATS):
        matcher = compiler.compile(_request(vocabulary, _ANY_OBJECT)).result(_COMPILE_S)
        for _ in range(_WALK_TOKENS):
            begin_s = time.thread_time()
            matcher.fill(words)
            taken_s.append(time.thread_time() - begin_s)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, vocabulary.eos_token_ids)]
            if not len(allowed):
                break
            matcher.accept(int(draw.choice(allowed)))
    return float(np.mean(taken_s))


# --- memory -------------------------------------------------------------------------------------------------


def _memory_bytes_per_s() -> float:
    source, target = np.ones(_MEMORY_BYTES, np.uint8), np.empty(_MEMORY_BYTES, np.uint8)
    return _MEMORY_BYTES / _least_s(lambda: np.copyto(target, source))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer simulate fit", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", default=str(TABLE), metavar="FILE", help="where the table goes")
    return parser
