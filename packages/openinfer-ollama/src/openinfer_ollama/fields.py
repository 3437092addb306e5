"""From a request to the fields that every route of the server samples by."""

from collections.abc import Mapping

import msgspec

from openinfer_ollama.options import Options
from openinfer_ollama.types import Request
from openinfer_server import GenerationFields, StructuredOutputs, invalid

# What errors of shared code call a field, and what this API calls it.
NAMES: Mapping[str, str] = {
    "context_tokens": "options.num_ctx",
    "frequency_penalty": "options.frequency_penalty",
    "max_tokens": "options.num_predict",
    "min_p": "options.min_p",
    "presence_penalty": "options.presence_penalty",
    "repetition_penalty": "options.repeat_penalty",
    "seed": "options.seed",
    "stop": "options.stop",
    "structured_outputs.json": "format",
    "structured_outputs.json_object": "format",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
}


def generation_fields(request: Request) -> GenerationFields:
    """How an answer is sampled, as every other route has it.

    Raises:
        ApiError: 400; an option has a value that nothing here does.
    """
    options = _with_penalties(request.options or Options())
    return GenerationFields(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,  # Ollama's way to ask for any
        stop=options.stop,
        max_tokens=_max_tokens(options),
        structured_outputs=_structured(request),
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _max_tokens(options: Options) -> int | None:
    # until the model ends it, and until the context is full: both end where the context does
    return None if options.num_predict in (-1, -2) else options.num_predict


def _with_penalties(options: Options) -> Options:
    """The options with their penalties off, where these are to count no token."""
    last = options.repeat_last_n
    if last in (None, -1):
        return options
    if last != 0:
        message = f"options.repeat_last_n is {last}; penalties count the whole text (-1) or are off (0)"
        raise invalid("options.repeat_last_n", message)
    return msgspec.structs.replace(options, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def _structured(request: Request) -> StructuredOutputs | None:
    wanted = request.format
    if wanted is None or isinstance(wanted, str):
        return StructuredOutputs(json_object=True) if wanted else None
    return StructuredOutputs(json=wanted)
