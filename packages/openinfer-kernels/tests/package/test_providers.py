"""Operators of other packages: how they are put beside our own, and a kit that notices when one is wrong."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest

from openinfer_kernels import CacheFormat, Ops, PagedCache
from openinfer_kernels.catalogue import WITHOUT_GPU_KERNEL
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.errors import ArrayMismatchError, KernelProviderError, OperatorMissingError
from openinfer_kernels.providers import PROVIDABLE, provide, why_not
from openinfer_kernels.testing import ConformanceError
from openinfer_kernels.testing.case import Case
from openinfer_kernels.testing.cases import CASES
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.testing.providers import check_added_operator, check_kernel_provider, check_operator

BATCH = make_batch(1)
"""Products do not look at it."""


class Doubled:
    """Doubles what a norm gives, and serves nothing else."""

    operators = ("rms_norm",)
    architectures = ("cpu",)

    def bind(self, own: Ops) -> dict[str, Callable[..., Any]]:
        return {"rms_norm": lambda *given, **named: 2 * own.rms_norm(*given, **named)}


class Forgetful(Doubled):
    operators = ("rms_norm", "linear")


def test_provided_operator_stands_in_for_our_own_and_the_rest_stays():
    own = CpuOps()
    ops = provide(own, {"rms_norm": Doubled()})
    x, weight = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    np.testing.assert_array_equal(ops.rms_norm(x, weight, eps=0.0), 2 * own.rms_norm(x, weight, eps=0.0))
    np.testing.assert_array_equal(ops.linear(x, np.eye(4, dtype=np.float32), BATCH), x)
    assert ops.name == "cpu"
    assert provide(own, {}) is own


def test_what_an_operator_raises_says_whose_it_is():
    ops = provide(CpuOps(), {"rms_norm": Doubled()})
    with pytest.raises(ValueError, match="shape") as raised:
        ops.rms_norm(np.ones((2, 4), np.float32), np.ones(3, np.float32), eps=0.0)
    assert raised.value.__notes__ == [f"raised in rms_norm of the kernel provider {__name__}.Doubled"]


def test_operator_that_was_not_bound_is_refused():
    with pytest.raises(KernelProviderError, match=r"Forgetful\.bind returned no linear"):
        provide(CpuOps(), {"linear": Forgetful()})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, weight: x, r"rms_norm\(x, weight\); the contract's is rms_norm\(x, weight, \*, eps\): .*'eps'"),
        (lambda x, *, eps: x, r"rms_norm\(x, \*, eps\); the contract's is rms_norm\(x, weight, \*, eps\): too many"),
    ],
)
def test_function_that_the_arguments_do_not_fit_is_refused(function: Callable[..., Any], message: str):
    class Other(Doubled):
        def bind(self, own: Ops) -> dict[str, Callable[..., Any]]:
            return {"rms_norm": function}

    with pytest.raises(KernelProviderError, match=f"Other.bind returned {message}"):
        provide(CpuOps(), {"rms_norm": Other()})


def test_reasons_say_what_is_possible():
    assert why_not(Doubled(), "rms_norm", architecture="cpu") is None
    assert "it does not serve linear, but rms_norm" in str(why_not(Doubled(), "linear", architecture="cpu"))
    assert "serves cpu, and this device is sm_90a" in str(why_not(Doubled(), "rms_norm", architecture="sm_90a"))
    assert "possible: add_rms_norm, " in str(why_not(Doubled(), "sample", architecture="cpu"))


def test_every_operator_of_the_contract_is_providable_but_for_memory_and_sampling():
    """A new one must be listed; if it fuses others, it has to be made of the provided ones where there are any."""
    contract = {name for name in dir(Ops) if not name.startswith("_")}
    uploads = {"upload", "upload_weight", "upload_float32", "upload_quantised", "upload_dequantised", "quantise_head"}
    memory = {
        "extra",
        "fused_adapters",
        "name",
        "download",
        "zeros",
        "copy_rows",
        "loading",
        "host_weights",
        "copy_weights",
        *uploads,
    }
    choices = {"sample", "logprobs", "ngram_drafts", "top_experts", "table_experts"}
    drafting = {"hidden_before", "keep_hidden", "settle_hidden", "join_columns", "clear_rows", "put_ids", "add_logits"}
    drafting |= {"draft_ids", "draft_head", "draft_logits"}
    replay = {"keep_inputs", "replay_inputs"}
    assert contract - memory - choices - drafting - replay == {*PROVIDABLE}
    assert list(PROVIDABLE) == sorted(CASES)


@pytest.mark.parametrize("operator", ["causal_conv_silu", "gated_delta_rule", "rms_norm"])
def test_inputs_are_kept_by_our_own_operators_alone(operator: str):
    """Another's convolution would have states take in drafts that are refused."""
    own = CpuOps()

    class Other:
        operators = frozenset({operator})
        architectures = frozenset({"cpu"})

        def bind(self, own: Ops) -> dict[str, Any]:
            return {operator: getattr(own, operator)}

    provided = provide(own, {operator: Other()})
    shapes = {"conv": np.zeros((2, 1, 12, 3), np.float32), "state": np.zeros((2, 1, 1, 4, 4), np.float32)}
    kept = provided.keep_inputs(**shapes, most_tokens=3)
    assert (kept is None) == (operator != "rms_norm")


@pytest.mark.parametrize("operator", PROVIDABLE)
def test_our_own_operators_conform(ops, operator):
    if ops.name == "cuda" and operator in WITHOUT_GPU_KERNEL:
        with pytest.raises(OperatorMissingError, match=f"^{operator} has no CUDA kernel yet"):
            getattr(ops, operator)()
        return
    check_operator(getattr(ops, operator), operator, ops)


def wrong_eps(own: Ops, x: Any, weight: Any, *, eps: float) -> Any:
    return own.rms_norm(x, weight, eps=2 * eps)


def spreads_nan(own: Ops, x: Any, weight: Any, *, eps: float) -> Any:
    return own.rms_norm(x, weight, eps=eps) + 0 * x.sum()


def changes_its_input(own: Ops, x: Any, weight: Any, *, eps: float) -> Any:
    y = own.rms_norm(x, weight, eps=eps)
    x[:] = 0
    return y


def widens(own: Ops, x: Any, weight: Any, *, eps: float) -> Any:
    return own.rms_norm(x, weight, eps=eps).astype(np.float64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (wrong_eps, "the result is off by"),
        (spreads_nan, "NaN where none belongs"),
        (changes_its_input, "argument 0 was changed"),
        (widens, "the result is float64, not float32"),
    ],
)
def test_kit_notices_a_wrong_norm(wrong: Callable[..., Any], message: str):
    own = CpuOps()
    with pytest.raises(ConformanceError, match=message):
        check_operator(lambda *given, **named: wrong(own, *given, **named), "rms_norm", own)


def test_kit_says_what_an_operator_was_given_when_it_raised():
    message = r"^swiglu, .*float32\[\d+, \d+\], limit=.*: it raised TypeError: .*limit"
    with pytest.raises(ConformanceError, match=message):
        check_operator(lambda gate_up: CpuOps().swiglu(gate_up), "swiglu", CpuOps())


def test_kit_notices_a_residual_that_was_left_alone():
    own = CpuOps()

    def forgets(x: Any, residual: Any, weight: Any, *, eps: float) -> Any:
        return own.rms_norm(x + residual, weight, eps=eps)

    with pytest.raises(ConformanceError, match="argument 1, which is mutated, is off"):
        check_operator(forgets, "add_rms_norm", own)


def test_kit_notices_padding_that_was_written():
    own = CpuOps()

    def writes(qkv: Any, *, batch: Any, **named: Any) -> Any:
        slots = tuple(np.where(each < 0, 0, each) for each in batch.cache_slots)
        return own.qk_norm_rope_append(qkv, batch=dataclasses.replace(batch, cache_slots=slots), **named)

    with pytest.raises(ConformanceError, match=r"cache\.data"):
        check_operator(writes, "qk_norm_rope_append", own)


def in_the_first_table(batch: Any) -> Any:
    first = {"block_tables": batch.block_tables[:1] * 2, "cache_slots": batch.cache_slots[:1] * 2}
    return dataclasses.replace(batch, **first)


@pytest.mark.parametrize(
    "operator", ["qk_norm_rope_append", "rope_append", "paged_attention", "latent_norm_rope_append", "latent_attention"]
)
def test_kit_notices_a_layer_that_is_looked_up_in_another_block_table(operator: str):
    own = CpuOps()

    def wrong(*given: Any, batch: Any, **named: Any) -> Any:
        return getattr(own, operator)(*given, batch=in_the_first_table(batch), **named)

    with pytest.raises(ConformanceError, match=operator):
        check_operator(wrong, operator, own)


@pytest.mark.parametrize("operator", ["paged_attention", "latent_attention"])
def test_batch_invariant_attention_of_the_cpu_conforms(operator: str):
    check_operator(getattr(BatchInvariantCpuOps(), operator), operator, CpuOps())


@pytest.mark.parametrize(
    "operator",
    [
        "qk_norm_rope_append",
        "zero_centred_qk_norm_rope_append",
        "rope_append",
        "gated_qk_norm_rope_append",
        "paged_attention",
        "latent_norm_rope_append",
        "latent_attention",
    ],
)
@pytest.mark.parametrize("ops", [CpuOps(), BatchInvariantCpuOps()], ids=["cpu", "batch-invariant"])
def test_cache_of_a_format_that_an_operator_does_not_read_is_refused(ops: CpuOps, operator: str):
    def in_fp8(value: Any) -> Any:
        return dataclasses.replace(value, format=CacheFormat.FP8) if isinstance(value, PagedCache) else value

    case = next(iter(CASES[operator](np.random.default_rng(0))))
    named = {name: in_fp8(each) for name, each in case.keywords.items()}
    # Operators that read codes miss their scales; all others take no cache of codes.
    reasons = r"reads a KV cache in the compute dtype, and was given one in fp8|a cache of codes .* has scales none"
    with pytest.raises(ArrayMismatchError, match=reasons):
        getattr(ops, operator)(*map(in_fp8, case.positional), **named)


def test_kit_notices_blocks_before_a_window_that_are_read():
    own = CpuOps()

    def reads_all(q: Any, cache: Any, *, batch: Any, window: int | None = None, **named: Any) -> Any:
        out = own.paged_attention(q, cache, batch=batch, window=window, **named)
        return out + 0 * own.paged_attention(q, cache, batch=batch, **named)

    with pytest.raises(ConformanceError, match="NaN where none belongs"):
        check_operator(reads_all, "paged_attention", own)


def test_kit_notices_a_mask_that_sees_the_future():
    own = CpuOps()

    def sees_all(q: Any, cache: Any, *, batch: Any, **named: Any) -> Any:
        out = own.paged_attention(q, cache, batch=batch, **named)
        last = np.repeat(batch.query_starts[1:] - 1, np.diff(batch.query_starts))
        return np.ascontiguousarray(out[last])

    with pytest.raises(ConformanceError, match="paged_attention"):
        check_operator(sees_all, "paged_attention", own)


def wider(asked: dict[str, Any]) -> None:
    if asked.get("window") is not None:
        asked["window"] += 1


def narrower(asked: dict[str, Any]) -> None:
    if asked.get("window", 1) > 1:
        asked["window"] -= 1


def capped_before_the_scale(asked: dict[str, Any]) -> None:
    if asked.get("soft_cap") is not None:
        asked["soft_cap"] *= asked["scale"]


def scaled_sinks(asked: dict[str, Any]) -> None:
    if asked.get("sinks") is not None:
        asked["sinks"] = asked["sinks"] * np.float32(asked["scale"])


@pytest.mark.parametrize(
    "change",
    [
        wider,
        narrower,
        capped_before_the_scale,
        scaled_sinks,
        lambda asked: asked.pop("window", None),
        lambda asked: asked.pop("soft_cap", None),
        lambda asked: asked.pop("sinks", None),
    ],
    ids=["wider", "narrower", "capped before the scale", "scaled sinks", "no window", "no cap", "no sinks"],
)
def test_kit_notices_scores_that_are_not_what_was_asked_for(change: Callable[[dict[str, Any]], Any]):
    own = CpuOps()

    def wrong(q: Any, cache: Any, **asked: Any) -> Any:
        change(asked)
        return own.paged_attention(q, cache, **asked)

    with pytest.raises(ConformanceError, match=r"paged_attention, rows .*: the result (is off|has NaN)"):
        check_operator(wrong, "paged_attention", own)


def test_kit_notices_calls_that_differ():
    own, calls = CpuOps(), []

    def drifts(x: Any, weight: Any, *, eps: float) -> Any:
        calls.append(0)
        return own.rms_norm(x, weight, eps=eps) * np.float32(1 + 1e-6 * (len(calls) % 2))

    with pytest.raises(ConformanceError, match="two calls gave different bits"):
        check_operator(drifts, "rms_norm", own)


def test_kit_refuses_a_provider_of_nothing_of_ours_or_of_another_device():
    class Sampler(Doubled):
        operators = ("sample",)

    class Nothing(Doubled):
        operators = ()

    with pytest.raises(ConformanceError, match="serves no operator"):
        check_kernel_provider(Nothing, CpuOps(), architecture="cpu")
    with pytest.raises(ConformanceError, match="'sample' is not one of"):
        check_kernel_provider(Sampler, CpuOps(), architecture="cpu")
    with pytest.raises(ConformanceError, match="serves cpu, and this device is sm_80"):
        check_kernel_provider(Doubled, CpuOps(), architecture="sm_80")
    with pytest.raises(ConformanceError, match="the result is off"):
        check_kernel_provider(Doubled, CpuOps(), architecture="cpu")


def triple(x: Any, *, times: int = 1) -> Any:
    return x * np.float32(3**times)


class Tripling:
    """Adds an operator; on a GPU of its fantasy it is another function."""

    operators = ("triple", "rms_norm")
    architectures = ("cpu", "sm_90a")
    cpu_twins: ClassVar[dict[str, Callable[..., Any]]] = {"triple": triple}

    def bind(self, own: Ops) -> dict[str, Callable[..., Any]]:
        return {"triple": lambda x, *, times=1: own.linear(x, 3**times * np.eye(2), BATCH), "rms_norm": own.rms_norm}


def tripled(rng: np.random.Generator) -> Iterable[Case]:
    yield Case(name="some", positional=(rng.normal(size=(3, 5)).astype(np.float32),), keywords={"times": 2})


def test_added_operator_is_found_by_its_name_and_others_are_as_before():
    own = CpuOps()
    ops = provide(own, {"triple": Tripling(), "rms_norm": Doubled()})
    x = np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(ops.extra["triple"](x), 3 * x)
    np.testing.assert_array_equal(ops.rms_norm(x, x[0], eps=0.0), 2 * x)
    np.testing.assert_array_equal(ops.linear(x, x, BATCH), 2 * x)
    assert dict(own.extra) == {}


def test_added_operator_of_a_gpu_is_what_was_bound():
    class FakeGpu(CpuOps):
        name = "cuda"

    x = np.ones((1, 2), np.float32)
    ops = provide(FakeGpu(), {"triple": Tripling()})
    np.testing.assert_array_equal(ops.extra["triple"](x, times=2), 9 * x)


def test_operator_that_nothing_added_is_named_with_those_that_are_there():
    with pytest.raises(OperatorMissingError, match=r"no extra operator 'fold': none was added; a family names"):
        CpuOps().extra["fold"]
    ops = provide(CpuOps(), {"triple": Tripling()})
    with pytest.raises(OperatorMissingError, match=r"'fold': there are triple; .* --kernel-providers fold=PROVIDER"):
        ops.extra["fold"]


def test_added_operator_needs_a_twin_a_name_of_its_own_and_a_device_that_it_serves():
    class WithoutTwin(Doubled):
        operators = ("triple",)

    class Sampling(Tripling):
        cpu_twins: ClassVar[dict[str, Callable[..., Any]]] = {"sample": triple}

    class OnTheCpuAlone(Tripling):
        operators = ()

    assert why_not(Tripling(), "triple", architecture="cpu") is None
    assert why_not(Tripling(), "triple", architecture="sm_90a") is None
    assert "it adds 'triple' without a twin" in str(why_not(WithoutTwin(), "triple", architecture="cpu"))
    assert "'sample' is not an operator that can be" in str(why_not(Sampling(), "sample", architecture="cpu"))
    assert "'fold' is not an operator that can be" in str(why_not(Tripling(), "fold", architecture="cpu"))
    other = str(why_not(Tripling(), "triple", architecture="sm_80"))
    assert other == "it serves triple on cpu, sm_90a, and this device is sm_80"
    assert "it serves triple on cpu, and this" in str(why_not(OnTheCpuAlone(), "triple", architecture="sm_90a"))


def test_kit_checks_added_operators_by_the_cases_that_it_is_given():
    check_kernel_provider(Tripling, CpuOps(), architecture="cpu", extra_cases={"triple": tripled})
    with pytest.raises(ConformanceError, match="the added operator triple has no cases"):
        check_kernel_provider(Tripling, CpuOps(), architecture="cpu")
    with pytest.raises(ConformanceError, match="triple is tried with nothing"):
        check_kernel_provider(Tripling, CpuOps(), architecture="cpu", extra_cases={"triple": lambda rng: ()})
    with pytest.raises(ConformanceError, match="triple, some: the result is off"):
        check_added_operator(lambda x, *, times: 2 * x, triple, "triple", tripled, CpuOps())
