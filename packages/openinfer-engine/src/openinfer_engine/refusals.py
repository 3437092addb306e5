"""What a `config.json` may ask for that a family does not compute: reasons to refuse it, each by name.

A config has many keys that say nothing about the mathematics, so unknown keys pass. A family names the keys by which
published relatives of its models change the forward pass: a wrong answer looks like an answer, so a key that asks for
anything is refused rather than ignored. Each function here yields the reasons of one kind.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from openinfer_kernels import RopeConfigError, RopeParameters

# key -> why it is refused: what no family here computes; one that does leaves the key out
PLAIN_DECODER: Mapping[str, str] = MappingProxyType(
    {
        "attention_bias": "biases in the attention are not served",
        "mlp_bias": "biases in the MLP are not served",
        "use_sliding_window": "a sliding window in use is not served, only full attention",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "final_logit_softcapping": "soft-capped logits are not served",
        "pruned_heads": "pruned heads are not served",
    }
)
# the same for a family that reads BF16 alone
PLAIN_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "quantised weights are not served; use the BF16 checkpoint",
        "compression_config": "compressed weights are not served; use the BF16 checkpoint",
    }
)


def key_reasons(config: Mapping[str, Any], changes: Mapping[str, str]) -> Iterator[str]:
    """Keys that are neither absent, null, false, 0 nor empty, with what `changes` says of each."""
    for key, reason in changes.items():
        if config.get(key):
            yield f"{key} is {shortened(config[key])}: {reason}"


def value_reasons(config: Mapping[str, Any], only: Mapping[str, Any]) -> Iterator[str]:
    """Keys that say something else than the one value that is served."""
    for key, served in only.items():
        if config.get(key, served) != served:
            yield f"{key} is {shortened(config[key])}: only {served!r} is served"


def architecture_reasons(config: Mapping[str, Any], *served: str) -> Iterator[str]:
    """Another class of the reference than those that are served."""
    named: object = config.get("architectures") or []
    if named and named not in [[each] for each in served]:
        yield f"architectures is {shortened(named)}: only {' or '.join(served)} is served"


def code_reasons(
    config: Mapping[str, Any], *, prefix: str = "AutoModel", published: str | None = None
) -> Iterator[str]:
    """Python code that the checkpoint brings for a class whose name begins so.

    The `published` code is what the family stands for; it is not run either.
    """
    auto_map: object = config.get("auto_map") or {}
    codes = cast("dict[str, object]", auto_map) if isinstance(auto_map, dict) else {str(auto_map): None}
    for name, code in codes.items():
        if name.startswith(prefix) and (published is None or code not in (None, published)):
            yield f"auto_map names code, {code} for {name}: code of a checkpoint is never run"


def rope_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """A rotary embedding that `RopeParameters` does not have."""
    try:
        RopeParameters.from_config(config)
    except RopeConfigError as error:
        yield str(error)


def shortened(value: object) -> str:
    """A value of a config for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
