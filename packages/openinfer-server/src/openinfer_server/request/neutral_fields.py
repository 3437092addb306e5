"""Fields that change nothing on any route that generates, and their rules."""

from collections.abc import Mapping
from typing import ClassVar, Final

from openinfer_server.request.rules import ANY, Label, Neutral, Refused, Rule
from openinfer_server.request.sampling_fields import SamplingNumberFields

USER: Final = Label("it says whom the request is for, and users are not counted")
METADATA: Final = Label("it labels what is stored, and nothing is")
LABELS: Final[Mapping[str, Rule]] = {
    "client_metadata": Label("it says which client asks", max_length=2**14, max_pairs=64, max_key_length=256),
    "service_tier": Neutral(("auto", "default"), "there is one tier, which auto and default name"),
}
"""Of fields beside the sampling parameters."""
NO_TRANSFER: Final = Refused("completions, chats and token ids hand KV on; use one of their routes")
NO_OBFUSCATION: Final = Neutral(
    (False,), "false asks for what is always so; no padding is added, events are as long as their text"
)
NO_TURNS: Final[Mapping[str, Rule]] = {
    "add_generation_prompt": Neutral((True,), "a prompt of text has no turns, and is continued as it is"),
    "continue_final_message": Neutral((False,), "a prompt of text has no turns, and is continued as it is"),
}
"""Of fields that say where the prompt of a chat ends, on routes without chats."""


class NeutralSamplingFields(SamplingNumberFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of other servers that have one value here."""

    best_of: object = None
    length_penalty: object = None
    skip_special_tokens: object = None
    spaces_between_special_tokens: object = None
    use_beam_search: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "best_of": Neutral((1,), "one is what is always so; ask for n choices and choose yourself"),
        "length_penalty": Neutral((1,), "one asks for what is always so; other values are for beams"),
        "skip_special_tokens": Neutral(
            (True,), "true asks for what is always so; /inference/v1/generate returns all token ids"
        ),
        "spaces_between_special_tokens": Neutral(ANY, "special tokens do not show, nor what would stand between them"),
        "use_beam_search": Neutral((False,), "false asks for what is always so; tokens are sampled here"),
    }
