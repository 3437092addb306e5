"""Conformance of a `KernelProvider`: each operator that it serves against the CPU's in float32, over odd shapes.

Inputs are brought to the device first and the truth is computed from what arrived, so that rounding an input is
not counted as an error. A call must leave its inputs alone but for what the contract says is mutated, answer in the
compute dtype (logits in float32), answer the same bits twice, and keep a NaN within its row.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.ops import AttentionBatch, Ops
from openinfer_kernels.providers import PROVIDABLE, KernelProvider, Operator, cpu_twins, provide, why_not
from openinfer_kernels.testing.case import Case
from openinfer_kernels.testing.cases import CASES
from openinfer_kernels.testing.errors import ConformanceError, require
from openinfer_kernels.testing.expert_cases import HostQuantised

_FLOAT32_ERROR = 2e-5
_BFLOAT16_ERROR = 2.0**-6
"""Relative errors: of float32 sums in any order; of two roundings to BF16 on the way and one of the result."""

Cases: TypeAlias = Callable[[np.random.Generator], Iterable[Case]]
"""What an operator is tried with, drawn from a seeded generator."""
_NO_CASES: Mapping[str, Cases] = MappingProxyType({})

_Key: TypeAlias = int | str
"""An argument by position or keyword; `KEYWORD.FIELD` is an array inside of it."""


def check_kernel_provider(
    make: Callable[[], KernelProvider],
    own: Ops,
    *,
    architecture: str,
    extra_cases: Mapping[str, Cases] = _NO_CASES,
) -> None:
    """Checks every operator of a provider on one device.

    Args:
        make: gives the provider: its class, as a rule.
        own: the operators of that device: `CpuOps()`, `CudaOps()`.
        architecture: of the device: `cpu`, or `ops.device.architecture`.
        extra_cases: what each operator that it adds is tried with; it is compared with its twin.

    Raises:
        ConformanceError: it does not conform.
        KernelProviderError: it does not bind what it says it serves.
    """
    provider = make()
    twins = cpu_twins(provider)
    operators = {*provider.operators, *twins}
    require(operators, "the provider serves no operator")
    for operator in sorted(operators):
        known = operator in PROVIDABLE or not hasattr(Ops, operator)
        require(known, f"{operator!r} is not one of {', '.join(PROVIDABLE)}")
        reason = why_not(provider, operator, architecture=architecture)
        require(reason is None, f"the provider cannot serve {operator}: {reason}")
        ops = provide(own, {operator: provider})
        if operator in twins:
            require(operator in extra_cases, f"the added operator {operator} has no cases: give some as extra_cases")
            check_added_operator(ops.extra[operator], twins[operator], operator, extra_cases[operator], own)
        else:
            check_operator(getattr(ops, operator), operator, own)


def check_operator(call: Operator, operator: str, own: Ops) -> None:
    """Checks one operator.

    Args:
        call: has the parameters of the method `operator` of `Ops`.
        operator: its name, one of `PROVIDABLE`.
        own: the operators of its device.

    Raises:
        ConformanceError: it does not conform.
    """
    check_added_operator(call, getattr(CpuOps(), operator), operator, CASES[operator], own)


def check_added_operator(call: Operator, twin: Operator, operator: str, cases: Cases, own: Ops) -> None:
    """Checks one operator against another in NumPy, which is the truth.

    Args:
        call: of a device.
        twin: the same in NumPy.
        operator: its name.
        cases: gives what it is tried with, at least one.
        own: the operators of its device.

    Raises:
        ConformanceError: it does not conform.
    """
    given = list(cases(np.random.default_rng(zlib.crc32(operator.encode()))))
    require(given, f"{operator} is tried with nothing")
    for case in given:
        _check_case(call, twin, operator, case, own)


def _check_case(call: Operator, twin: Operator, operator: str, case: Case, own: Ops) -> None:
    where = f"{operator}, {case.name}"
    given = _uploaded(case, own)
    before = {key: _host(array, own) for key, array in _arrays(given)}
    try:
        results = _leaves(_call(call, given))
    except Exception as error:
        message = f"{where}, {_described(_arguments(case))}: it raised {type(error).__name__}: {error}"
        raise ConformanceError(message) from error

    truth = _with_arrays(_arguments(case), {key: array.copy() for key, array in before.items()})
    truth = _with_quantised(truth, CpuOps())
    expected = _leaves(_call(twin, truth))
    require(len(results) == len(expected), f"{where}: the result has {len(results)} arrays, not {len(expected)}")
    for index, (result, right) in enumerate(zip(results, expected, strict=True)):
        what = f"{where}: the result" + (f" {index}" if len(expected) > 1 else "")
        dtype = _dtype_of_result(right, own, in_float32=index in case.in_float32)
        require(result.dtype == dtype, f"{what} is {result.dtype}, not {dtype}")
        tolerance = 2 * _tolerance(own.zeros((1,)).dtype) if case.rounded_inside else _tolerance(dtype)
        _require_close(_host(result, own), right, tolerance, what)
    expected_after = dict(_arrays(truth))
    for key, array in _arrays(given):
        after = _host(array, own)
        if key in case.mutated:
            tolerance = _FLOAT32_ERROR if key in case.unrounded else _tolerance(own.zeros((1,)).dtype)
            _require_close(after, expected_after[key], tolerance, f"{where}: argument {key}, which is mutated,")
        else:
            require(_same(after, before[key]), f"{where}: argument {key} was changed, and Case.mutated has it not")

    again = [_host(each, own) for each in _leaves(_call(call, _uploaded(case, own)))]
    same = all(_same(one, _host(other, own)) for one, other in zip(again, results, strict=True))
    require(same, f"{where}: two calls gave different bits")


def _dtype_of_result(expected: Any, own: Ops, *, in_float32: bool) -> np.dtype[Any]:
    """Of an array that the CPU's operator gave as `expected`."""
    if expected.dtype != np.float32 or in_float32:
        return np.dtype(expected.dtype)
    return own.zeros((1,)).dtype


def _tolerance(dtype: np.dtype[Any]) -> float:
    return _FLOAT32_ERROR if dtype.itemsize == 4 else _BFLOAT16_ERROR


def _uploaded(case: Case, own: Ops) -> dict[_Key, Any]:
    """The arguments on the device."""

    def upload(key: _Key, value: Any, *, in_batch: bool) -> Any:
        is_activation = value.dtype == np.float32 and not in_batch and key not in case.exact
        return own.upload_weight(value) if is_activation else own.upload(value)

    arguments = _arguments(case)
    batches = {str(key) for key, value in arguments.items() if isinstance(value, AttentionBatch)}
    uploaded = _with_arrays(
        arguments,
        {
            key: upload(key, array, in_batch=str(key).split(".", maxsplit=1)[0] in batches)
            for key, array in _arrays(arguments)
        },
    )
    return _with_quantised(uploaded, own)


def _arguments(case: Case) -> dict[_Key, Any]:
    """The arguments as the case has them."""
    return {**dict(enumerate(case.positional)), **case.keywords}


def _arrays(arguments: Mapping[_Key, Any]) -> list[tuple[_Key, Any]]:
    """Every array among the arguments, also those that are fields of dataclasses, or in tuples that are."""
    found: list[tuple[_Key, Any]] = []
    for key, value in arguments.items():
        if _is_array(value):
            found.append((key, value))
        for name, each in _fields(value).items():
            inside = {f"{key}.{name}": each, **{f"{key}.{name}.{i}": one for i, one in enumerate(_entries(each))}}
            found += [(place, array) for place, array in inside.items() if _is_array(array)]
    return found


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _entries(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()


def _with_arrays(arguments: Mapping[_Key, Any], arrays: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """The arguments with other arrays in the same places."""

    def replaced(key: _Key, value: Any) -> Any:
        fields = _fields(value)
        if key in arrays or not fields:
            return arrays.get(key, value)
        for name, each in fields.items():
            entries = tuple(arrays.get(f"{key}.{name}.{i}", one) for i, one in enumerate(_entries(each)))
            fields[name] = entries or arrays.get(f"{key}.{name}", each)
        return dataclasses.replace(value, **fields)

    return {key: replaced(key, value) for key, value in arguments.items()}


def _with_quantised(arguments: Mapping[_Key, Any], ops: Ops) -> dict[_Key, Any]:
    """The arguments with quantised weights on the device of `ops`."""
    return {key: each.upload(ops) if isinstance(each, HostQuantised) else each for key, each in arguments.items()}


def _leaves(result: Any) -> list[Any]:
    """The arrays of a result: none, one, those of a tuple or of a dataclass, in order."""
    if result is None:
        return []
    if isinstance(result, tuple):
        return [leaf for each in cast("tuple[Any, ...]", result) for leaf in _leaves(each)]
    if dataclasses.is_dataclass(result):
        return [leaf for field in dataclasses.fields(result) for leaf in _leaves(getattr(result, field.name))]
    return [result]


def _call(call: Operator, arguments: Mapping[_Key, Any]) -> Any:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return call(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _described(arguments: Mapping[_Key, Any]) -> str:
    """What a call was given, by shape and dtype: the values say nothing."""

    def described(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}" if _is_array(value) else repr(value)

    plain = {key: each for key, each in arguments.items() if _is_array(each) or not _fields(each)}
    return ", ".join(
        described(each) if isinstance(key, int) else f"{key}={described(each)}" for key, each in plain.items()
    )


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
    """The largest, relative to a value and the typical one of its array, as sums cancel; NaN is passed over.

    An infinity is right where the same one is expected.
    """
    finite = np.isfinite(expected)
    typical = np.sqrt(np.mean(expected**2, where=finite)) if finite.any() else 1.0
    differs = (got != expected) & ~np.isnan(expected)
    if np.isinf(got[differs]).any() or np.isinf(expected[differs]).any():
        return np.inf
    errors = np.abs(got[differs] - expected[differs]) / (np.abs(expected[differs]) + typical)
    return float(errors.max(initial=0.0))
