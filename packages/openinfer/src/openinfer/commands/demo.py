"""`openinfer demo`: loads the tiny model, streams a completion, then a short chat turn."""

import argparse
import time
from collections.abc import Iterable, Sequence

from openinfer.llm import LLM

PROMPT = "The capital of France is"
QUESTION = "What is the capital of Japan?"


def run(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="openinfer demo", description=__doc__).parse_args(argv)
    begin_s = time.perf_counter()
    with LLM("tiny") as llm:
        print(f"loaded the tiny model in {time.perf_counter() - begin_s:.2f} s (a toy: see openinfer-tiny-model)\n")
        print(PROMPT, end="", flush=True)
        _show(llm.stream(PROMPT, max_tokens=24, temperature=0))
        print(f"\nuser: {QUESTION}\nassistant: ", end="", flush=True)
        prompt = llm.render([{"role": "user", "content": QUESTION}], template={"enable_thinking": False})
        _show(llm.stream(prompt, max_tokens=48, temperature=0))
    return 0


def _show(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
