"""Processor time of each piece of a long turn before it is admitted, alone in one thread.

    python tools/agents/turn_pieces.py [--model FOLDER] [--json FILE]

A conversation of 500 KB, of which all but the last 2 KB were encoded before; medians of eleven turns. Pieces are those
of `openinfer_server.openai.chat` and of the frame to the engine; what HTTP takes, and waiting, is not in them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from openinfer.models import find_model_dir
from openinfer_bench.prompts import conversation, turn
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.process.kept_prompts import (
    KEPT_IDS,
    KeptPrompts,
    PromptBuffer,
    SentPrompts,
    SharedIds,
    prompt_parts,
)
from openinfer_core.process.wire import FrameBuffer, KnownPrompt, PromptPart, Submit, encode_frame, to_engine_decoder
from openinfer_core.provenance import provenance
from openinfer_core.request import NamedBeginning, token_id_beyond, with_prompt
from openinfer_server import ServerOptions
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.chat.turns import template_turns
from openinfer_server.http.body_checks import check_elements
from openinfer_server.http.sliced_json import decode_body
from openinfer_server.openai.types import ChatRequest
from openinfer_server.text.known_prefixes import Scope
from openinfer_server.text.tokenizer import Tokenizer

T = TypeVar("T")

NUM_TURNS = 11
NUM_TOKEN_IDS = 2**18


def main() -> None:
    """Prints a table; `--json` also writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of tokenizer and template; by default the tiny model's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    pieces, num_tokens = measured(find_model_dir("tiny") if arguments.model is None else arguments.model)
    medians = {name: round(statistics.median(taken), 2) for name, taken in pieces.items()}
    for name, taken_ms in medians.items():
        print(f"{name:>20} {taken_ms:6.2f} ms")
    print(f"{'all':>20} {sum(medians.values()):6.2f} ms, {num_tokens} tokens")
    if arguments.json is not None:
        content = {**msgspec.to_builtins(provenance()), "tokens": num_tokens, "ms": medians}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def measured(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each piece in each turn but the first, which makes the conversation known; tokens at the end."""
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, timeout_s=60, max_characters=2**26)
    if template is None:
        raise SystemExit(f"{folder} has no chat template")
    controls = tokenizer.control_tokens(own_texts=template.own_texts)
    decoder = msgspec.json.Decoder(ChatRequest)
    sent, buffer = SentPrompts(KEPT_IDS), PromptBuffer(KeptPrompts(KEPT_IDS), SharedIds(NUM_TOKEN_IDS))
    max_elements = ServerOptions().max_body_elements

    def one(clock: "Clock", body: bytes) -> int:
        elements = clock.take("elements", lambda: check_elements(body, max_elements))
        request = clock.take("JSON", lambda: decode_body(decoder, body, held=[], elements=elements))
        turns = clock.take("turns", lambda: template_turns(request.messages, developer_role="system"))
        text = clock.take("template", lambda: template.render(turns, {}))
        begun = clock.take("look-up", lambda: controls.begin(text, Scope("owner")))
        prompt, beginnings = clock.take("what is new", lambda: controls.finish(begun))
        clock.take("ids' range", lambda: _check_range(tokenizer, prompt))
        asked = clock.take("request", lambda: _request(prompt, beginnings))
        frames = clock.take("frames", lambda: _frames(sent, asked))
        read = clock.take("frames read", lambda: _read(buffer, frames))
        if read.prompt_token_ids != prompt:
            raise SystemExit("the prompt that arrives is another one")
        clock.take("ids' limit", lambda: token_id_beyond(read, NUM_TOKEN_IDS))
        return len(prompt)

    session = conversation(0, 500_000)
    pieces: dict[str, list[float]] = {}
    num_tokens = 0
    for number in range(NUM_TURNS + 1):
        body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": session}).encode()
        num_tokens = one(Clock(pieces if number else {}), body)
        session.extend(turn(session))
    return pieces, num_tokens


class Clock:
    """Processor time of this thread."""

    def __init__(self, pieces: dict[str, list[float]]) -> None:
        self._pieces = pieces

    def take(self, name: str, work: Callable[[], T]) -> T:
        begin_s = time.thread_time()
        result = work()
        self._pieces.setdefault(name, []).append(1000 * (time.thread_time() - begin_s))
        return result


def _check_range(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """As for a model that has all of the tokenizer's ids."""
    if tokenizer.max_token_id >= NUM_TOKEN_IDS:
        raise SystemExit("the tokenizer has more ids than this takes a model to have")


def _request(prompt: tuple[int, ...], beginnings: tuple[NamedBeginning, ...]) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId(1),
        prompt_token_ids=prompt[:1],
        sampling=SamplingParams(max_tokens=1),
        beginnings=beginnings,
    )
    return with_prompt(request, prompt, ())


def _frames(sent: SentPrompts, request: GenerateRequest) -> Sequence[bytearray]:
    """As `RemoteEngine.submit` makes them."""
    sending = sent.plan(request.prompt_token_ids, (), cache_salt=None, beginnings=request.beginnings)
    parts, rest = prompt_parts(request, sending)
    known = [] if sending.known is None else [sending.known]
    frames = [encode_frame(message) for message in (*known, *parts, Submit(rest))]
    sent.sent(sending, request.prompt_token_ids)
    return frames


def _read(buffer: PromptBuffer, frames: Sequence[bytearray]) -> GenerateRequest:
    """As the engine's `LinkServer` reads them."""
    for body in FrameBuffer().feed(b"".join(frames)):
        message = to_engine_decoder.decode(body)
        if isinstance(message, KnownPrompt):
            buffer.begin(message)
        elif isinstance(message, PromptPart):
            buffer.take(message)
        elif isinstance(message, Submit):
            return buffer.complete(message.request)
    raise SystemExit("no request came out of the frames")


if __name__ == "__main__":
    main()
