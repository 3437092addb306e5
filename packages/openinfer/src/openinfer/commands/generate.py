"""`openinfer generate`: continues a prompt on the terminal, as it comes."""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from openinfer.commands.model_arguments import parse
from openinfer.flags import add_flags, given_flags, read_flags
from openinfer.llm import DEFAULT_MAX_TOKENS, LLM
from openinfer_core import SamplingParams
from openinfer_core.sampling_defaults import SamplingDefaultsFrom

_NOT_FLAGS = frozenset({"allowed_token_ids", "bad_words", "grammar", "logprobs", "prompt_logprobs"})


def run(argv: Sequence[str]) -> int:
    arguments = parse(argv, command="generate", description=__doc__ or "", configure=configure, positional=False)
    namespace = arguments.namespace
    read_flags(namespace, SamplingParams, preset={"max_tokens": DEFAULT_MAX_TOKENS})  # refused before it is loaded
    sampling = given_flags(namespace, SamplingParams)
    options = msgspec.structs.asdict(arguments.options) | {"engine_host": "thread"}
    with LLM(
        str(arguments.model_dir),
        family=arguments.family.name,
        sampling_defaults=namespace.sampling_defaults,
        **msgspec.to_builtins(options),
    ) as llm:
        if namespace.chat:
            turn = {"role": "user", "content": namespace.prompt}
            pieces = llm.stream_chat([turn], stop=namespace.stop, **sampling)
        else:
            pieces = llm.stream(namespace.prompt, stop=namespace.stop, **sampling)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command itself."""
    parser.add_argument("prompt", help="the text to continue; - reads standard input", type=_text)
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's turn through the chat template"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--sampling-defaults",
        choices=tuple(map(str, SamplingDefaultsFrom)),
        default=str(SamplingDefaultsFrom.MODEL),
        help="where the values of sampling parameters come from that are not given: the model's generation_config.json "
        "first, or the defaults below alone (default: model)",
    )
    add_flags(parser, SamplingParams, skip=_NOT_FLAGS)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument
