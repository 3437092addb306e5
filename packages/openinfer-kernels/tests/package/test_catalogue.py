"""What is said of kernels is true of the sources, the contract and the repository's measurements."""

from pathlib import Path

import pytest

from openinfer_kernels import Ops
from openinfer_kernels.catalogue import (
    CUBLASLT,
    SERVINGS,
    WITHOUT_GPU_KERNEL,
    kernels_by_part,
    measured_by_part,
    servings,
)
from openinfer_kernels.cubins import ARCHITECTURES, sources

ROOT = Path(__file__).parents[4]
OF_MEMORY = {
    "quantise_head",
    "extra",
    "fused_adapters",
    "upload",
    "upload_float32",
    "download",
    "keep_inputs",
    "zeros",
    "copy_rows",
    "host_weights",
    "copy_weights",
    "name",
    "loading",
    "random_weight",
}
"""Methods of the contract that launch no kernel of ours, or copy."""
OF_HOPPER = {"draft_head", "draft_logits"}
"""What is refused by name on other GPUs."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_source_is_named_and_every_name_is_a_source(architecture):
    """A new kernel is added to `openinfer_kernels.catalogue.SERVINGS`, with what was measured of it."""
    named = {each.kernel for each in servings(architecture)} - {CUBLASLT}
    compiled = {source.stem for source in sources(architecture)}
    assert named <= compiled
    everywhere = {each.kernel for each in SERVINGS}
    assert compiled <= everywhere


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_operator_is_served_on_every_architecture_but_for_those_named(architecture):
    served = {operator for each in servings(architecture) for operator in each.operators}
    contract = {name for name in dir(Ops) if not name.startswith("_")}
    assert contract - OF_MEMORY - OF_HOPPER - served == {*WITHOUT_GPU_KERNEL}
    assert served <= contract
    assert {operator for each in SERVINGS for operator in each.operators} >= OF_HOPPER


def test_what_was_measured_names_its_file():
    for each in SERVINGS:
        assert bool(each.measured) == bool(each.source), each
        if each.source and (ROOT / "benchmarks").is_dir():  # not where only the wheel is installed
            assert (ROOT / each.source).is_file(), f"{each.kernel}: {each.source} is gone; say where its figures are"


def test_parts_are_named_by_phase_with_the_preferred_kernel_first():
    hopper, ampere = kernels_by_part("sm_90a"), kernels_by_part("sm_80")
    assert hopper["prefill attention"].startswith("attention_prefill_hopper")
    assert ampere["prefill attention"].startswith("attention_prefill (")
    assert hopper["decode products"].startswith("decode_gemm")
    assert "decode products" not in ampere
    assert ampere["products"].startswith("cuBLASLt")
    assert "FlashInfer's FA3 613 TFLOP/s (docs/notes/kernels.md)" in measured_by_part("sm_90a")["prefill attention"]


def test_operators_of_other_packages_are_not_said_to_be_ours():
    assert "norms" in kernels_by_part("sm_90a", skip=["rms_norm"])
    norms = ["rms_norm", "add_rms_norm", "zero_centred_rms_norm", "add_zero_centred_rms_norm"]
    assert "norms" not in kernels_by_part("sm_90a", skip=norms)
