"""Tables of rotary position embeddings: plain, and stretched to longer contexts by YaRN.

Plain: Su et al. 2021, "RoFormer", eq. 34 (`inv_i = theta^(-2 i / D)`). YaRN: Peng et al. 2023, "YaRN",
section 3.2 to 3.4, with the parameters, defaults and rounding of bounds of Hugging Face's
`_compute_yarn_parameters`. Both are static: nothing depends on the length of a sequence, so that one table
serves all sequences. Angles are computed in float64; the reference multiplies position and frequency in
float32, which differs by up to `position * 6e-8` radians.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.errors import RopeConfigError

_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_YARN_FIELDS = frozenset(
    {
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    }
)
_FIELDS_BY_TYPE = {"default": _COMMON_FIELDS, "yarn": _COMMON_FIELDS | _YARN_FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """How YaRN stretches a rotary embedding; names and defaults are those of Hugging Face configs."""

    factor: float
    """Longer context over original context, >= 1."""
    original_max_position_embeddings: int
    """Context length of the pre-training, in tokens."""
    beta_fast: float = 32.0
    """Dimensions that turn at least this often over the original context are left as they are."""
    beta_slow: float = 1.0
    """Dimensions that turn at most this often over the original context are slowed down by `factor`."""
    attention_factor: float | None = None
    """Multiplies cosines and sines; None derives it from `factor` and the two mscale fields."""
    attn_factor: float = 1.0
    """Multiplies what is derived where `attention_factor` is None; transformers does not read it."""
    mscale: float | None = None
    """Used with `mscale_all_dim` where `attention_factor` is None."""
    mscale_all_dim: float | None = None
    """Used with `mscale` where `attention_factor` is None."""
    truncate: bool = True
    """Whether the bounds of the ramp are rounded outwards to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """A rotary embedding over all of a head's dimensions."""

    theta: float
    """Base of the wavelengths."""
    yarn: YarnScaling | None = None
    """None is the plain embedding."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads a parsed `config.json`, in either spelling.

        Args:
            config: holds `rope_parameters`, or `rope_theta` and optionally `rope_scaling`;
                and `max_position_embeddings` where YaRN needs a default.

        Raises:
            RopeConfigError: unknown rope type, unknown field, missing or impossible value.
        """
        fields = _rope_fields(config)
        rope_type = fields.get("rope_type", fields.get("type", "default"))
        _refuse_unknown(rope_type, fields)
        theta = _positive(fields, "rope_theta")
        if theta <= 1:
            raise RopeConfigError(f"rope parameter rope_theta must be larger than 1, not {theta}")
        yarn = _yarn_scaling(fields, config) if rope_type == "yarn" else None
        return cls(theta=theta, yarn=yarn)


def rope_table(parameters: RopeParameters, *, head_dim: int, positions: int) -> NDArray[np.float32]:
    """Cosines, then sines, of every position: `[2, positions, head_dim / 2]` float32.

    YaRN's attention factor is multiplied into both, as the reference does; the softmax scale stays untouched.

    Args:
        parameters: which embedding.
        head_dim: number of rotated dimensions, even.
        positions: positions 0 .. positions - 1 get a row; ask for as many as the engine admits.

    Raises:
        RopeConfigError: `head_dim` is odd or not positive.
    """
    if head_dim <= 0 or head_dim % 2:
        raise RopeConfigError(f"head_dim {head_dim} cannot be rotated in pairs: it must be even and positive")
    frequencies = _inverse_frequencies(parameters, head_dim)
    factor = 1.0 if parameters.yarn is None else attention_factor(parameters.yarn)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    table = np.empty((2, positions, head_dim // 2), np.float32)
    table[0] = np.cos(angles) * factor
    table[1] = np.sin(angles) * factor
    return table


def partial_rope_table(
    parameters: RopeParameters, *, head_dim: int, num_rotated: int, positions: int
) -> NDArray[np.float32]:
    """A table `[2, positions, head_dim / 2]` for heads of which `num_rotated` dimensions are rotated.

    For `rope_append` and its relatives, and Q and K whose rows were put in `partial_rope_order`: its first
    `num_rotated / 2` pairs turn, the others have cosines of 1 and sines of 0. Black et al. 2022, "GPT-NeoX-20B",
    section 2.1.

    Args:
        parameters: which embedding, without a `partial_rotary_factor`, which `RopeParameters.from_config` refuses.
        head_dim: of a head, even.
        num_rotated: its first dimensions, even, at most `head_dim`.
        positions: as in `rope_table`.

    Raises:
        RopeConfigError: `num_rotated` or `head_dim` is odd or out of bounds.
    """
    _check_partial(head_dim, num_rotated)
    table = np.zeros((2, positions, head_dim // 2), np.float32)
    table[0] = 1
    table[:, :, : num_rotated // 2] = rope_table(parameters, head_dim=num_rotated, positions=positions)
    return table


def partial_rope_order(*, head_dim: int, num_rotated: int) -> NDArray[np.int64]:
    """`[head_dim]`: which dimension of a published head stands at each place, for `partial_rope_table`.

    Published pairs are `(i, i + num_rotated / 2)`, those of whole heads `(i, i + head_dim / 2)`. Q and K in one order
    have the products that they had. Biases, and norms of Q and K per head, take it too; V does not.

    Raises:
        RopeConfigError: `num_rotated` or `head_dim` is odd or out of bounds.
    """
    _check_partial(head_dim, num_rotated)
    rotated, rest = np.split(np.arange(head_dim), [num_rotated])
    halves = zip(np.split(rotated, 2), np.split(rest, 2), strict=True)
    return np.concatenate([part for half in halves for part in half])


def _check_partial(head_dim: int, num_rotated: int) -> None:
    if head_dim % 2 or num_rotated % 2 or not 0 < num_rotated <= head_dim:
        raise RopeConfigError(
            f"{num_rotated} of {head_dim} dimensions cannot be rotated in pairs: both must be even, and 2 or more"
        )


def attention_factor(yarn: YarnScaling) -> float:
    """What YaRN multiplies cosines and sines by: as given, or from the mscale fields, or `0.1 ln(factor) + 1`.

    The latter two times `attn_factor` (`YaRNScalingRotaryEmbedding` of vLLM). DeepSeek-R1-0528-Qwen3-8B has 0.878 for a
    factor of 4, which makes 1.0.
    """
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn.attn_factor * _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn.attn_factor * _mscale(yarn.factor, 1.0)


def softmax_factor(yarn: YarnScaling | None) -> float:
    """What DeepSeek's models multiply the scale of their scores by: the square of YaRN's magnitude.

    `DeepseekV2Attention` of transformers: `(0.1 mscale_all_dim ln(factor) + 1)^2`, and 1 without `mscale_all_dim`.
    """
    return 1.0 if yarn is None or not yarn.mscale_all_dim else _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _inverse_frequencies(parameters: RopeParameters, head_dim: int) -> NDArray[np.float64]:
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    plain = parameters.theta ** (-2.0 * pairs / head_dim)
    if parameters.yarn is None:
        return plain
    low, high = _ramp_bounds(parameters.yarn, parameters.theta, head_dim)
    slowed_share = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    return plain / parameters.yarn.factor * slowed_share + plain * (1.0 - slowed_share)


def _ramp_bounds(yarn: YarnScaling, theta: float, head_dim: int) -> tuple[float, float]:
    """Pairs between which YaRN goes over from the plain to the slowed frequency; the second is larger."""

    def pair_that_turns(times: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope fields of a config in one dictionary, without those that are null."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise RopeConfigError(
            f"config has rope_parameters {new} and a different rope_scaling {old}: remove one of them"
        )
    given: object = new or old or {}
    if not isinstance(given, dict):
        raise RopeConfigError(f"rope parameters must be a JSON object, not {given!r}")
    fields = cast("dict[str, Any]", given)
    theta = config.get("rope_theta")
    return {"rope_theta": theta} | {name: value for name, value in fields.items() if value is not None}


def _refuse_unknown(rope_type: object, fields: Mapping[str, Any]) -> None:
    if not isinstance(rope_type, str) or rope_type not in _FIELDS_BY_TYPE:
        raise RopeConfigError(
            f"rope type {rope_type!r} is not supported; supported are {', '.join(sorted(_FIELDS_BY_TYPE))}"
        )
    unknown = sorted(fields.keys() - _FIELDS_BY_TYPE[rope_type])
    if unknown:
        raise RopeConfigError(
            f"rope parameters {', '.join(unknown)} are not supported with rope type {rope_type!r}; "
            f"supported are {', '.join(sorted(_FIELDS_BY_TYPE[rope_type]))}"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise RopeConfigError(
            f"partial_rotary_factor {fields['partial_rotary_factor']!r} is not supported: only whole heads are rotated"
        )


def _yarn_scaling(fields: Mapping[str, Any], config: Mapping[str, Any]) -> YarnScaling:
    known = dict(fields)
    longest = config.get("max_position_embeddings")
    known.setdefault("original_max_position_embeddings", longest)
    if config.get("original_max_position_embeddings") is not None:
        known["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    original = _positive(known, "original_max_position_embeddings")
    if "factor" not in known and longest is not None:
        known["factor"] = longest / original
    factor = _positive(known, "factor")
    if factor < 1:
        raise RopeConfigError(f"rope factor {factor} would shorten the context: it must be at least 1")
    if known.get("attention_factor") is not None and known.get("attn_factor") is not None:
        raise RopeConfigError(
            "rope parameters attention_factor and attn_factor contradict each other; keep one of them"
        )
    truncate = known.get("truncate", True)
    if not isinstance(truncate, bool):
        raise RopeConfigError(f"rope parameter truncate must be true or false, not {truncate!r}")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(original),
        beta_fast=_positive(known, "beta_fast", default=32.0),
        beta_slow=_positive(known, "beta_slow", default=1.0),
        attention_factor=_positive(known, "attention_factor") if "attention_factor" in known else None,
        attn_factor=_positive(known, "attn_factor", default=1.0),
        mscale=_number(known, "mscale") if "mscale" in known else None,
        mscale_all_dim=_number(known, "mscale_all_dim") if "mscale_all_dim" in known else None,
        truncate=truncate,
    )


def _positive(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    value = _number(fields, name, default=default)
    if value <= 0:
        raise RopeConfigError(f"rope parameter {name} must be positive, not {value}")
    return value


def _number(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RopeConfigError(f"rope parameter {name} must be a finite number, not {value!r}")
    return float(value)
