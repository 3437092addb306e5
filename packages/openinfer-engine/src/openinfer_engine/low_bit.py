"""What a user may have in few bits that the checkpoint has not: activations of prompts, the output head."""

from typing import Any

from openinfer_core import Refused
from openinfer_engine.backends import Backend
from openinfer_engine.options import EngineOptions, LowBitActivations
from openinfer_engine.weights.quantization_config import QuantisedConfig
from openinfer_kernels import Code
from openinfer_kernels.weights.low_bit_activations import FP8_ROWS, PromptSteps, is_served

_SERVED = "E4M3 in blocks of 128 x 128, and E4M3 or symmetric INT8 with scales per row or per matrix"


def check_low_bit(options: EngineOptions, config: Any, backend: Backend) -> None:
    """Raises `Refused`: no product of the model can have what was asked for, or the device has no kernels for it."""
    codes: set[Code] = set()
    if options.low_bit_activations is LowBitActivations.PREFILL:
        codes.add(_code_of(config))
    if codes or options.fp8_head:
        backend.check_low_bit(codes, fp8_head=options.fp8_head)


def described_low_bit(options: EngineOptions, config: Any) -> dict[str, str]:
    """For `openinfer plan`, by what it is; nothing where nothing was asked for."""
    found: dict[str, str] = {}
    if options.low_bit_activations is LowBitActivations.PREFILL:
        steps = PromptSteps()
        found["activations"] = (
            f"{_code_of(config)} in steps of {steps.least_tokens} tokens and more, {steps.least_query_tokens} of a row"
        )
    if options.fp8_head:
        found["output_head"] = str(FP8_ROWS)
    return found


def _code_of(config: Any) -> Code:
    """What activations are quantised to: the code of the weights."""
    stored = config.stored if isinstance(config, QuantisedConfig) else None
    if stored is None:
        raise Refused(
            "--low-bit-activations prefill: no matrix of this model is quantised in a way that its products can use; "
            f"they take {_SERVED}"
        )
    if not is_served(stored.format.format):
        raise Refused(
            f"--low-bit-activations prefill: this model has {stored.described}, and no product with them takes "
            f"quantised activations, as those with {_SERVED} do"
        )
    return stored.format.format.code
