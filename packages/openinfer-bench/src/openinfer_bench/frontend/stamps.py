"""What the benchmark's token ids mean."""

from openinfer_core.simulated import SimulatedOptions

STAMPS = 10_000
"""Token ids: the time at which a token was made, in tenths of a millisecond, modulo one second."""
OPEN_CALL = STAMPS
"""Token id of a text that opens a tool call, up to inside a string of its arguments."""
OPEN_CALL_TEXT = '<tool_call>{"name":"stamp","arguments":{"times":"'
OPEN_REASONING = STAMPS + 1
"""Token id of the tag that opens reasoning."""
OPEN_REASONING_TEXT = "<think>"
NUM_TOKEN_IDS = STAMPS + 2


class StampedOptions(SimulatedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the stamped engine behaves."""

    opening_token_id: int | None = None
    """What every completion begins with, before the stamps."""
