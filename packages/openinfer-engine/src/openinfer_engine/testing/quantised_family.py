"""What must hold of every family whose weights may be quantised: it computes with exactly what they stand for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing.family import FamilyHarness
from openinfer_engine.testing.quantised_checkpoints import Scheme, schemes, write_quantised
from openinfer_engine.weights.checkpoint import Checkpoint

_NUM_TOKENS = 21
_VOCABULARY = 100


def projections(model_dir: Path) -> list[str]:
    """The matrices of a checkpoint that packages quantise: those that are called projections."""
    with Checkpoint.open(model_dir) as checkpoint:
        named = (name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight"))
        return [name for name in named if "_proj" in name.rpartition(".")[2]]


def check_quantised(
    definition: ModelDefinition[Any],
    source: Path,
    target: Path,
    scheme: str,
    *,
    group: int = 32,
    plain: tuple[str, ...] = (),
    ranks: int = 2,
    tolerance: float = 0,
) -> None:
    """Quantises a recorded model and compares its logits with float32 ones of what its matrices stand for.

    Args:
        definition: of the family.
        source: a BF16 checkpoint.
        target: a folder that is made.
        scheme: of `SCHEMES`.
        group: columns of a group of integers, where the layout leaves it open.
        plain: parts of the names of projections that stay in BF16.
        ranks: into how many the model is cut as well.
        tolerance: of one rank's logits; 0 where no product is split, as a part of one is plain.

    Raises:
        AssertionError: the logits differ, or quantising changed nothing.
    """
    chosen: Scheme = replace(schemes(group)[scheme], plain=plain)
    values = write_quantised(source, target, chosen, projections(source))
    assert values, "no matrix was quantised"
    tokens = np.random.default_rng(7).integers(0, _VOCABULARY, _NUM_TOKENS).tolist()

    def logits(model_dir: Path, *, ranks: int = 1, dummy: bool = False) -> Any:
        return FamilyHarness(definition, model_dir, ranks=ranks, dummy=dummy).step({"a": tokens})["a"]

    expected = logits(target / "dequantised")
    np.testing.assert_allclose(logits(target), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(logits(target, ranks=ranks), expected, rtol=0, atol=max(tolerance, 1e-4))
    assert np.abs(expected - logits(source)).max() > 20 * tolerance, (
        "the quantised model is the one that it was made of"
    )
    dummy = logits(target, dummy=True)
    assert np.isfinite(dummy).all()
    assert dummy.std() > 0.1, "logits of random weights are flat"
