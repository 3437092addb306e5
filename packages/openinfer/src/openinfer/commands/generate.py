"""`openinfer generate`: continues a prompt on the terminal, as it comes."""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from openinfer.commands.model_arguments import parse
from openinfer.flags import add_flags, read_flags
from openinfer.llm import DEFAULT_MAX_TOKENS, LLM
from openinfer_core import SamplingParams

_NOT_FLAGS = frozenset({"grammar", "logprobs", "prompt_logprobs"})


def run(argv: Sequence[str]) -> int:
    arguments = parse(argv, command="generate", description=__doc__ or "", configure=_configure)
    namespace = arguments.namespace
    sampling = read_flags(namespace, SamplingParams, preset={"max_tokens": DEFAULT_MAX_TOKENS})
    options = msgspec.structs.asdict(arguments.options) | {"engine_host": "thread"}
    with LLM(str(arguments.model_dir), family=arguments.family.name, **msgspec.to_builtins(options)) as llm:
        prompt = namespace.prompt
        if namespace.chat:
            prompt = llm.render([{"role": "user", "content": prompt}])
        for piece in llm.stream(prompt, stop=namespace.stop, **msgspec.structs.asdict(sampling)):
            print(piece, end="", flush=True)
        print()
    return 0


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - reads standard input", type=_text)
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's turn through the chat template"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    add_flags(parser, SamplingParams, skip=_NOT_FLAGS)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument
