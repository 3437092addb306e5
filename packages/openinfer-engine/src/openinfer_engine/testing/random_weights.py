"""Weights at random for a config: a model of any sizes for tests that compare one run with another."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_engine.model import ModelDefinition
from openinfer_engine.weights.stored_tensor import StoredTensor, TensorSpec


def random_weights(definition: ModelDefinition[Any], config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Arrays that BF16 holds exactly, by published name, so that all devices compute with the same ones.

    Matrices keep the size of what they are multiplied with; vectors, taken to be weights of norms, are near 1.

    Args:
        definition: of the family.
        config: what `config.json` says.

    Raises:
        Refused: the family does not compute this model.
        TypeError: it has quantised weights or tables of ids.
    """
    rng = np.random.default_rng(0)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, shape in definition.tensors(definition.parse(config)).items():
        if isinstance(shape, StoredTensor):
            raise TypeError(f"{name} is stored in another dtype than float32")
        values = rng.normal(size=shape).astype(np.float32)
        weights[name] = bf16_exact(1 + values / 10 if len(shape) == 1 else values * np.float32(shape[-1] ** -0.5))
    return weights


def spread_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, NDArray[np.float32]]:
    """Arrays in float32, by name, of a drafter whose drafts differ: vectors near 1, matrices that enlarge twofold."""
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, spec in specs.items():
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        is_vector = len(shape) == 1
        spread = 0.2 if is_vector else 2 * shape[-1] ** -0.5
        tensors[name] = rng.normal(float(is_vector), spread, shape).astype(np.float32)
    return tensors


def bf16_exact(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut off to what BF16 holds, in float32."""
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
