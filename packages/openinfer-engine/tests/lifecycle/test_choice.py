"""What `--enable-sleep` excludes on a GPU, by name."""

import pytest

from openinfer_core import Refused
from openinfer_engine import EngineOptions
from openinfer_engine.lifecycle.choice import check_sleep
from openinfer_engine.options import DeviceKind, LowBitActivations


def test_what_sleep_excludes_on_a_gpu_is_refused_by_name() -> None:
    given = {"speculative": "ngram,k=2"}
    with pytest.raises(Refused, match="--enable-sleep and --speculative exclude each other"):
        check_sleep(EngineOptions(enable_sleep=True, device=DeviceKind.CUDA, **given))
    check_sleep(EngineOptions(enable_sleep=True, **given))
    check_sleep(EngineOptions(device=DeviceKind.CUDA, **given))


def test_engines_of_gpus_may_sleep() -> None:
    check_sleep(EngineOptions(enable_sleep=True, device=DeviceKind.CUDA, tensor_parallel_size=2))
    check_sleep(EngineOptions(enable_sleep=True, device=DeviceKind.CUDA, batch_invariant=True, cuda_graph=False))
    check_sleep(EngineOptions(enable_sleep=True, device=DeviceKind.CUDA, max_loras=1, step_trace="trace"))
    low_bit = {"low_bit_activations": LowBitActivations.PREFILL, "fp8_head": True}
    check_sleep(EngineOptions(enable_sleep=True, device=DeviceKind.CUDA, **low_bit))
