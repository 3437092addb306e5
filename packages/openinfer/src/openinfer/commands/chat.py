"""`openinfer chat`: talk to a model on the terminal.

openinfer chat MODEL [flags]        a path, a name, or a repository of the hub, in this process
openinfer chat --url URL            a server that runs
"""

import argparse
import contextlib
import os
from collections.abc import Sequence

import msgspec

from openinfer.chat.session import ChatSession
from openinfer.commands.flag_parser import FlagParser
from openinfer.commands.model_arguments import parse
from openinfer.flags import add_flags, given_flags
from openinfer_core import SamplingParams

_NOT_FLAGS = frozenset({"allowed_token_ids", "bad_words", "grammar", "logprobs", "prompt_logprobs"})


def run(argv: Sequence[str]) -> int:
    """Talks until ctrl-d; ctrl-c stops an answer."""
    with contextlib.suppress(ImportError):  # not on every system: lines can then not be edited
        import readline as _readline

        del _readline
    if any(each == "--url" or each.startswith("--url=") for each in argv):
        return _with_server(argv)
    return _with_model(argv)


def _with_server(argv: Sequence[str]) -> int:
    from openinfer.chat.speakers import ServerSpeaker

    parser = FlagParser(prog="openinfer chat", description=__doc__)
    parser.add_argument("--url", required=True, metavar="URL", help="http://HOST:PORT of a server that runs")
    parser.add_argument("--served-model", metavar="NAME", help="what the server calls its model (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: OPENAI_API_KEY)")
    configure(parser)
    parser.add_helps()
    chosen = parser.parse_strictly(argv)
    speaker = ServerSpeaker(
        chosen.url,
        model=chosen.served_model,
        api_key=chosen.api_key or os.environ.get("OPENAI_API_KEY"),
        sampling=msgspec.to_builtins(given_flags(chosen, SamplingParams)),
    )
    print(f"{speaker.model} at {chosen.url}; /help lists commands, ctrl-d ends")
    ChatSession(speaker, system=chosen.system).run()
    return 0


def _with_model(argv: Sequence[str]) -> int:
    from openinfer.chat.speakers import ModelSpeaker
    from openinfer.llm import LLM

    arguments = parse(argv, command="chat", description=__doc__ or "", configure=configure)
    options = msgspec.structs.asdict(arguments.options) | {"engine_host": "thread"}
    with LLM(str(arguments.model_dir), family=arguments.family.name, **msgspec.to_builtins(options)) as llm:
        print(f"{arguments.model_name}; /help lists commands, ctrl-d ends")
        whole = {"max_tokens": llm.info.max_model_tokens}  # to the end of the context, unless it is given
        speaker = ModelSpeaker(llm, whole | given_flags(arguments.namespace, SamplingParams))
        ChatSession(speaker, system=arguments.namespace.system).run()
    return 0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command itself."""
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    add_flags(parser, SamplingParams, skip=_NOT_FLAGS)
