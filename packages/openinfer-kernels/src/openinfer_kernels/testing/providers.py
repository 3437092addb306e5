"""Conformance of a `KernelProvider`: each operator that it serves against the CPU's in float32, over odd shapes.

Inputs are brought to the device first and the truth is computed from what arrived, so that rounding an input is
nobody's error. A call must leave its inputs alone but for what the contract says is mutated, answer in the compute
dtype (logits in float32), answer the same bits twice, and keep a NaN within its row.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.ops import AttentionBatch, Ops
from openinfer_kernels.providers import PROVIDABLE, KernelProvider, Operator, provide, why_not
from openinfer_kernels.testing.cases import CASES, Case
from openinfer_kernels.testing.errors import require

_FLOAT32_ERROR = 2e-5
_BFLOAT16_ERROR = 2.0**-6
"""Relative errors: of float32 sums in any order; of two roundings to BF16 on the way and one of the result."""

_ANSWERS_IN_FLOAT32 = ("logits",)
"""Whatever the compute dtype."""


def check_kernel_provider(make: Callable[[], KernelProvider], own: Ops, *, architecture: str) -> None:
    """Checks every operator of a provider on one device.

    Args:
        make: gives the provider: its class, as a rule.
        own: the operators of that device: `CpuOps()`, `CudaOps()`.
        architecture: of the device: `cpu`, or `ops.device.architecture`.

    Raises:
        ConformanceError: it does not conform.
        KernelProviderError: it does not bind what it says it serves.
    """
    provider = make()
    require(provider.operators, "the provider serves no operator")
    for operator in sorted(provider.operators):
        require(operator in PROVIDABLE, f"{operator!r} is not one of {', '.join(PROVIDABLE)}")
        reason = why_not(provider, operator, architecture=architecture)
        require(reason is None, f"the provider cannot serve {operator}: {reason}")
        check_operator(getattr(provide(own, {operator: provider}), operator), operator, own)


def check_operator(call: Operator, operator: str, own: Ops) -> None:
    """Checks one operator.

    Args:
        call: has the parameters of the method `operator` of `Ops`.
        operator: its name, one of `PROVIDABLE`.
        own: the operators of its device.

    Raises:
        ConformanceError: it does not conform.
    """
    rng = np.random.default_rng(zlib.crc32(operator.encode()))
    for case in CASES[operator](rng):
        _check_case(call, operator, case, own)


def _check_case(call: Operator, operator: str, case: Case, own: Ops) -> None:
    where = f"{operator}, {case.name}"
    given = _uploaded(case, own)
    before = {key: _host(array, own) for key, array in given.items() if _is_array(array)}
    result = _call(call, given)
    compute_dtype = own.zeros((1,)).dtype
    dtype = np.dtype(np.float32) if operator in _ANSWERS_IN_FLOAT32 else compute_dtype
    require(result.dtype == dtype, f"{where}: the result is {result.dtype}, not {dtype}")

    truth = {key: before.get(key, value) for key, value in _arguments(case).items()}
    truth = {key: value.copy() if _is_array(value) else value for key, value in truth.items()}
    expected = _call(getattr(CpuOps(), operator), truth)
    tolerance = _FLOAT32_ERROR if dtype.itemsize == 4 else _BFLOAT16_ERROR
    _require_close(_host(result, own), expected, tolerance, f"{where}: the result")
    for key, array in before.items():
        after = _host(given[key], own)
        if key in case.mutated:
            _require_close(after, truth[key], tolerance, f"{where}: argument {key}, which is mutated,")
        else:
            require(_same(after, array), f"{where}: argument {key} was changed")

    again = _uploaded(case, own)
    require(_same(_host(_call(call, again), own), _host(result, own)), f"{where}: two calls gave different bits")


def _uploaded(case: Case, own: Ops) -> dict[int | str, Any]:
    """The arguments on the device, by position or keyword."""

    def upload(key: int | str, value: Any) -> Any:
        if isinstance(value, AttentionBatch):
            arrays = [field.name for field in dataclasses.fields(value) if _is_array(getattr(value, field.name))]
            return dataclasses.replace(value, **{name: own.upload(getattr(value, name)) for name in arrays})
        if not _is_array(value):
            return value
        is_activation = value.dtype == np.float32 and key not in case.exact
        return own.upload_weight(value) if is_activation else own.upload(value)

    return {key: upload(key, value) for key, value in _arguments(case).items()}


def _arguments(case: Case) -> dict[int | str, Any]:
    """The arguments as the case has them."""
    return {**dict(enumerate(case.positional)), **case.keywords}


def _call(call: Operator, arguments: Mapping[int | str, Any]) -> Any:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return call(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _host(array: Any, own: Ops) -> Any:
    """As float32, which holds every value of any compute dtype; integers as they are."""
    found = own.download(array)
    return found if found.dtype.kind in "iu" else found.astype(np.float32)


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _require_close(got: Any, expected: Any, tolerance: float, what: str) -> None:
    require(got.shape == expected.shape, f"{what} has shape {got.shape}, not {expected.shape}")
    same_nan = bool((np.isnan(got) == np.isnan(expected)).all())
    require(same_nan, f"{what} has NaN where none belongs, or none where one does")
    error = _relative_error(got.astype(np.float64), expected.astype(np.float64))
    require(error <= tolerance, f"{what} is off by {error:.1e}; at most {tolerance:.1e} is allowed")


def _relative_error(got: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The largest, relative to a value and the typical one of its array, as sums cancel; NaN is passed over."""
    typical = np.sqrt(np.nanmean(expected**2)) if np.isfinite(expected).any() else 1.0
    errors = np.abs(got - expected) / (np.abs(expected) + typical)
    return float(np.max(errors, initial=0.0, where=~np.isnan(errors)))
