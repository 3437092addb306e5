"""`PARAMETERS`: the numbers of a request that say how its tokens are drawn. Every layer's declarations follow from it.

    this table ──► at run time    the checks of `SamplingParams`, the bounds in the server's OpenAPI document
          └──────► generated      fields of `SamplingParams` and of the server's bodies, columns of `SamplingBatch`,
                                  the record of a slot in NumPy and in CUDA: `python tools/sampling/generate.py`

A parameter is added by a row here, and by what it does in `cpu/sampling` and `csrc/sampling` of the kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameter:
    """One number, of which a request without it has the default."""

    name: str
    kind: type[int] | type[float]
    default: float
    low: float
    high: float
    excludes_low: bool = False  # whether `low` itself is refused
    # Whether it is a column of the sampling batch; otherwise it is handed over with the statistics it needs.
    in_batch: bool = True
    meaning: str = ""

    @property
    def bounds(self) -> str:
        """As mathematics writes them: `(0, 1]`."""
        return f"{'(' if self.excludes_low else '['}{self.low:.15g}, {self.high:.15g}]"


def _penalty(name: str, meaning: str, *, low: float = -2.0, high: float = 2.0, off: float = 0.0) -> SamplingParameter:
    return SamplingParameter(name=name, kind=float, default=off, low=low, high=high, in_batch=False, meaning=meaning)


PARAMETERS = (
    SamplingParameter(name="temperature", kind=float, default=1.0, low=0.0, high=100.0, meaning="0 is greedy."),
    SamplingParameter(name="top_k", kind=int, default=0, low=0, high=2**31 - 1, meaning="0 keeps all."),
    SamplingParameter(
        name="top_p", kind=float, default=1.0, low=0.0, high=1.0, excludes_low=True, meaning="1 keeps all."
    ),
    SamplingParameter(
        name="min_p",
        kind=float,
        default=0.0,
        low=0.0,
        high=1.0,
        meaning="0 keeps all. Drops tokens less likely than `min_p` times the likeliest.",
    ),
    _penalty("presence_penalty", "Subtracted once from the logit of every token that occurs in the output."),
    _penalty("frequency_penalty", "Subtracted from a token's logit once per occurrence in the output."),
    _penalty(
        "repetition_penalty",
        "Divides positive logits of tokens seen in prompt or output, and multiplies others.",
        low=0.01,
        high=100.0,
        off=1.0,
    ),
)
"""In the order in which they are checked."""
