"""`ModelText`: what a frontend needs next to an engine. It is read while the engine starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openinfer_core.sampling_defaults import SamplingDefaults, read_sampling_defaults
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.http.routes import Endpoints, load_endpoints
from openinfer_server.options import ServerOptions
from openinfer_server.text.tokenizer import Tokenizer

_RENDERED_PER_BODY_BYTE = 2  # a turn's frame in the prompt is about as long as its frame in JSON


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer, chat template and sampling defaults, and the APIs of other packages."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    endpoints: Sequence[Endpoints]
    sampling_defaults: SamplingDefaults

    @classmethod
    def load(cls, model_dir: Path, options: ServerOptions) -> "ModelText":
        """Reads a model folder.

        Raises:
            UnusableTokenizer: see there.
            UnusableTemplate: see there.
            InvalidCheckpoint: see `read_sampling_defaults`.
            PluginError: `options.endpoints` names what is not installed or does not load.
        """
        endpoints = load_endpoints(options.endpoints)
        sampling_defaults = read_sampling_defaults(model_dir, options.sampling_defaults)
        tokenizer = Tokenizer.load(model_dir)
        template = ChatTemplate.load(
            model_dir,
            timeout_s=options.template_timeout_s,
            max_characters=_RENDERED_PER_BODY_BYTE * options.max_body_bytes,
        )
        return cls(tokenizer, template, endpoints, sampling_defaults)
