"""Which kernel serves which operator on which GPU, what was measured of it, and of what else was tried in its place.

The one place for these facts: `openinfer kernels list` and `openinfer plan` print them, and a test holds them to the
sources, to the contract and to the files that the measurements are in. Importing this loads no CUDA library.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from openinfer_kernels.cubins.sources import ARCHITECTURES, HOPPER

CPU = "cpu"
CUBLASLT = "cuBLASLt"
"""The only kernels on a GPU that are not ours."""


class Phase(StrEnum):
    """Which steps a kernel serves."""

    PREFILL = "prefill"
    """Prompts and chunks of them, and steps of many rows."""
    DECODE = "decode"
    """One token per row."""
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One kernel, and what it is for."""

    part: str
    """What a model is made of: products, attention, norms."""
    phase: Phase
    operators: tuple[str, ...]
    """Methods of `Ops`; empty for what runs around a model."""
    kernel: str
    """`csrc/KERNEL.cu`, or a library."""
    architectures: tuple[str, ...] = ARCHITECTURES
    when: str = ""
    """What else it asks for."""
    measured: str = ""
    """On one H200, and of the alternative there."""
    source: str = ""
    """File of this repository with the measurement."""


_BEFORE_HOPPER_AND_AFTER = tuple(each for each in ARCHITECTURES if each != HOPPER)
_DECODE_GEMM = "benchmarks/results/h200/decode-gemm.json"
_GEMM = "benchmarks/results/h200/products-2026-11-21.json"
_ATTENTION = "benchmarks/results/h200/attention-2026-11-21.json"
_ATTENTION_DECODE = "benchmarks/results/h200/attention-decode-2026-11-21.json"
_LOWBIT = "benchmarks/results/h200/lowbit-products-2026-11-23.json"
_LOW_BIT_ACTIVATIONS = "benchmarks/results/h200/qwen3-4b-low-bit-activations.json"
_EXPERTS = "benchmarks/results/h200/experts-2026-11-22.json"
_SAMPLING = "benchmarks/results/h200/sampling-2026-11-21.json"
_FP8_CACHE = "attention over KV in FP8"
_ATTENTION_VARIANT = "attention with a window, a soft cap or sinks"
_LINEAR_ATTENTION = "benchmarks/results/h200/linear-attention-2026-11-22.json"

SERVINGS = (
    Serving(
        part="products",
        phase=Phase.DECODE,
        operators=("linear", "linear_swiglu", "logits"),
        kernel="decode_gemm",
        architectures=(HOPPER,),
        when="up to 32 tokens, out % 64 == 0, in % 128 == 0",
        measured="all products and norms of a Qwen3-4B step of 8 tokens in 2.31 ms; with cuBLASLt 2.75 ms",
        source=_DECODE_GEMM,
    ),
    Serving(
        part="products",
        phase=Phase.DECODE,
        operators=("linear", "linear_swiglu", "logits"),
        kernel="gemm",
        architectures=(HOPPER,),
        when="33 to 192 tokens, where its tiles keep the multiprocessors busy",
        measured="all products and norms of a Qwen3-4B step of 64 tokens in 2.54 ms; with cuBLASLt 2.90 ms",
        source=_GEMM,
    ),
    Serving(
        part="products",
        phase=Phase.PREFILL,
        operators=("linear", "linear_swiglu"),
        kernel="gemm",
        architectures=(HOPPER,),
        when="where its tiles fill the multiprocessors' time",
        measured="gate and up of 8,192 tokens with the gate in 1.25 ms; cuBLASLt and a gate 1.31 ms",
        source=_GEMM,
    ),
    Serving(
        part="products",
        phase=Phase.ANY,
        operators=("linear", "linear_swiglu", "logits"),
        kernel=CUBLASLT,
        when="what no other kernel takes; its algorithm by measurement at the start",
    ),
    Serving(part="gate", phase=Phase.ANY, operators=("linear_swiglu",), kernel="linear", when="after cuBLASLt"),
    Serving(
        part="gate",
        phase=Phase.ANY,
        operators=("linear_geglu", "geglu"),
        kernel="linear",
        when="after the kernel that serves the product in `linear`",
    ),
    Serving(
        part="adapters",
        phase=Phase.ANY,
        operators=("lora_shrink", "lora_expand", "lora_expand_swiglu"),
        kernel="lora",
        when="ranks in multiples of 8; where no kernel has adapters in the product",
    ),
    *(
        Serving(
            part="adapters",
            phase=Phase.ANY,
            operators=("linear", "linear_swiglu"),
            kernel=kernel,
            architectures=(HOPPER,),
            when=when,
        )
        for kernel, when in (
            (
                "shrink_halves",
                "with adapters, more tokens, whose A's have no multiple of 16 rows together: ahead of the next",
            ),
            ("adapted_decode_gemm", "with adapters, up to 16 tokens"),
            ("adapted_gemm_one_tile", "with adapters, up to 192 tokens"),
            ("adapted_gemm", "with adapters, more tokens"),
            ("prompt_shrink", "A x of more than 512 tokens, ahead of the next"),
            ("prompt_gemm", "with adapters, more than 512 tokens"),
            ("decode_gemm_beside_adapters", "whose adapters the kernel after it adds, 17 to 32 tokens"),
            ("gemm_beside_adapters", "whose adapters the kernel after it adds, up to 64 tokens"),
        )
    ),
    *(
        Serving(
            part="adapters",
            phase=Phase.ANY,
            operators=operators,
            kernel=kernel,
            architectures=(HOPPER,),
            when=when,
        )
        for operators, kernel, when in (
            (("add_rms_norm",), "adapted_norm", "of a product of 17 to 64 tokens with adapters, up to 4,096 values"),
            (("linear_swiglu",), "adapted_swiglu", "the same, after a product of gate and up"),
            (("qk_norm_rope_append",), "adapted_heads", "the same, head dimensions 64, 128, 256"),
            (("qk_norm_rope_append",), "adapted_heads_fp8", "the same, into a cache in FP8"),
        )
    ),
    Serving(part="soft cap of logits", phase=Phase.ANY, operators=("soft_cap",), kernel="linear"),
    Serving(
        part="attention",
        phase=Phase.DECODE,
        operators=("paged_attention",),
        kernel="attention_decode_hopper",
        architectures=(HOPPER,),
        when="head dimensions 64, 128, 256",
        measured="inside a step 0.87 of 4.3 TB/s at 64 rows of 1,024 tokens, 0.96 at 256",
        source=_ATTENTION_DECODE,
    ),
    Serving(
        part="attention",
        phase=Phase.DECODE,
        operators=("paged_attention",),
        kernel="attention_decode",
        architectures=_BEFORE_HOPPER_AND_AFTER,
        when="head dimensions 64, 128, 256",
        measured="on an H200 0.84 of 4.3 TB/s at 32 rows of 1,024 tokens, 0.96 at 256",
        source=_ATTENTION,
    ),
    Serving(
        part="attention",
        phase=Phase.PREFILL,
        operators=("paged_attention",),
        kernel="attention_prefill_hopper",
        architectures=(HOPPER,),
        when="head dimensions 64, 128, 256",
        measured="16 tokens after 16,368 in 35 us; one prompt of 16,384 at 620 TFLOP/s, FlashInfer's FA3 613 TFLOP/s",
        source="docs/notes/kernels.md",
    ),
    Serving(
        part="attention",
        phase=Phase.PREFILL,
        operators=("paged_attention",),
        kernel="attention_prefill",
        architectures=_BEFORE_HOPPER_AND_AFTER,
        when="head dimensions 32, 64, 128, 256",
        measured="261 TFLOP/s on an H200 at one prompt of 16,384 tokens",
        source="docs/notes/kernels.md",
    ),
    Serving(
        part="attention",
        phase=Phase.ANY,
        operators=("paged_attention",),
        kernel="attention_prefill",
        when="head dimension 32",
    ),
    *(
        Serving(
            part=_ATTENTION_VARIANT,
            phase=phase,
            operators=("paged_attention",),
            kernel=f"{kernel}_variant",
            architectures=architectures,
            when=f"a window, a soft cap or sinks; head dimensions {head_dims}",
        )
        for phase, kernel, architectures, head_dims in (
            (Phase.DECODE, "attention_decode_hopper", (HOPPER,), "64, 128, 256"),
            (Phase.DECODE, "attention_decode", _BEFORE_HOPPER_AND_AFTER, "64, 128, 256"),
            (Phase.PREFILL, "attention_prefill_hopper", (HOPPER,), "64, 128, 256"),
            (Phase.PREFILL, "attention_prefill", _BEFORE_HOPPER_AND_AFTER, "32, 64, 128, 256"),
            (Phase.ANY, "attention_prefill", ARCHITECTURES, "32"),
        )
    ),
    *(
        Serving(
            part=_FP8_CACHE,
            phase=phase,
            operators=("paged_attention",),
            kernel=f"{kernel}_fp8",
            architectures=architectures,
            when=f"a KV cache in FP8; head dimensions {head_dims}",
        )
        for phase, kernel, architectures, head_dims in (
            (Phase.DECODE, "attention_decode_hopper", (HOPPER,), "64, 128, 256"),
            (Phase.DECODE, "attention_decode", _BEFORE_HOPPER_AND_AFTER, "64, 128, 256"),
            (Phase.PREFILL, "attention_prefill_hopper", (HOPPER,), "64, 128, 256"),
            (Phase.PREFILL, "attention_prefill", _BEFORE_HOPPER_AND_AFTER, "32, 64, 128, 256"),
            (Phase.ANY, "attention_prefill", ARCHITECTURES, "32"),
        )
    ),
    Serving(
        part="contexts of KV in FP8",
        phase=Phase.PREFILL,
        operators=("paged_attention",),
        kernel="fp8_contexts",
        architectures=(HOPPER,),
        when="to BF16, for attention_prefill_hopper: steps of more than 512 tokens with room for their contexts",
    ),
    Serving(
        part="latent attention",
        phase=Phase.PREFILL,
        operators=("latent_attention",),
        kernel="latent_prefill_hopper",
        architectures=(HOPPER,),
        when="expanded: rows of 171 tokens and more in steps of more than 512",
    ),
    Serving(part="latents of contexts", phase=Phase.PREFILL, operators=("latent_attention",), kernel="latent_gather"),
    Serving(
        part="latent attention",
        phase=Phase.ANY,
        operators=("latent_attention",),
        kernel="latent_attention",
        when="absorbed: latents of 512 values, heads of 128 + 64 and 128; drafting layers from any key",
    ),
    Serving(part="latent queries", phase=Phase.ANY, operators=("latent_attention",), kernel="latent_queries"),
    Serving(part="latent sums", phase=Phase.ANY, operators=("latent_attention",), kernel="latent_merge"),
    Serving(part="latent values", phase=Phase.ANY, operators=("latent_attention",), kernel="latent_values"),
    Serving(
        part="RoPE and latent append", phase=Phase.ANY, operators=("latent_norm_rope_append",), kernel="latent_append"
    ),
    Serving(
        part="norms",
        phase=Phase.ANY,
        operators=("rms_norm", "add_rms_norm", "zero_centred_rms_norm", "add_zero_centred_rms_norm"),
        kernel="norm",
    ),
    Serving(part="gated norms", phase=Phase.ANY, operators=("gated_rms_norm",), kernel="gated_norm"),
    Serving(
        part="gates around attention",
        phase=Phase.ANY,
        operators=("gated_qk_norm_rope_append", "output_gate"),
        kernel="gated_attention",
    ),
    Serving(
        part="short convolutions",
        phase=Phase.ANY,
        operators=("causal_conv_silu", "replay_inputs"),
        kernel="causal_conv",
    ),
    Serving(
        part="linear attention",
        phase=Phase.DECODE,
        operators=("gated_delta_rule", "replay_inputs"),
        kernel="gated_delta_steps",
        measured="states of 64 rows of Qwen3.5-4B read and written at 3.5 TB/s; a copy reaches 4.2",
        source=_LINEAR_ATTENTION,
    ),
    Serving(
        part="linear attention",
        phase=Phase.PREFILL,
        operators=("gated_delta_rule",),
        kernel="gated_delta_prepare",
        when="heads of 128 x 128, 16 tokens or more of a row, before the walk; others as in decoding",
    ),
    Serving(
        part="linear attention",
        phase=Phase.PREFILL,
        operators=("gated_delta_rule",),
        kernel="gated_delta_walk",
        when="after gated_delta_prepare",
    ),
    Serving(
        part="RoPE and KV append",
        phase=Phase.ANY,
        operators=("qk_norm_rope_append", "zero_centred_qk_norm_rope_append", "rope_append"),
        kernel="qk_norm_rope_append",
    ),
    Serving(
        part="RoPE and KV append in FP8",
        phase=Phase.ANY,
        operators=("qk_norm_rope_append", "zero_centred_qk_norm_rope_append", "rope_append"),
        kernel="qk_norm_rope_append_fp8",
        when="head dimensions 32, 64, 128, 256",
    ),
    Serving(
        part="RoPE and KV append in FP8",
        phase=Phase.ANY,
        operators=("gated_qk_norm_rope_append",),
        kernel="gated_attention_fp8",
        when="head dimensions 64, 128, 256",
    ),
    Serving(
        part="routers",
        phase=Phase.ANY,
        operators=("top_experts", "table_experts"),
        kernel="routing",
        measured="8 of 384 experts for 1, 64 and 8,192 tokens in 3.7, 3.8 and 18 µs",
        source=_EXPERTS,
    ),
    Serving(part="experts", phase=Phase.ANY, operators=("experts", "swiglu"), kernel="experts"),
    Serving(
        part="experts",
        phase=Phase.PREFILL,
        operators=("experts",),
        kernel="grouped_gemm_hopper",
        architectures=(HOPPER,),
        when="BF16, more than 40 tokens per expert, no limit",
        measured="8,192 tokens of DeepSeek-V2-Lite: 614 TFLOP/s for gate and up, 597 for down",
        source="docs/notes/kernels.md",
    ),
    Serving(
        part="experts",
        phase=Phase.ANY,
        operators=("experts", "grouped_linear"),
        kernel="grouped_gemm_bf16",
        when="BF16; groups of up to 32 tokens",
        measured="DeepSeek-V2-Lite: 0.74 of 4.3 TB/s at 1 token, 0.92 at 4, 0.97 at 64",
        source=_EXPERTS,
    ),
    *(
        Serving(
            part="quantised products",
            phase=Phase.ANY,
            operators=("linear", "linear_swiglu"),
            kernel=f"lowbit_gemm_{each}",
            architectures=(HOPPER,),
            when=f"{codes}; up to {most} tokens, not with --batch-invariant",
            measured=measured,
            source=_LOWBIT if measured else "",
        )
        for each, codes, most, measured in (
            (
                "fp8",
                "E4M3",
                "2,048 (4,096 with scales in BF16)",
                "Qwen3-4B's products and norms of 1, 8 and 64 tokens: 1.79, 1.74, 2.48 ms; BF16 2.33, 2.31, 2.55",
            ),
            ("int4", "INT4", "4,096", "with groups of 128, zero points and a BF16 head: 1.65, 1.61, 2.24 ms"),
            ("int8", "INT8", "1,024", ""),
            ("int4_min", "INT4 with minimums", "1,024", ""),
            ("fp4", "E2M1", "1,024", ""),
            ("nvfp4", "E2M1 in groups of 16 with scales of E4M3", "1,024", ""),
        )
    ),
    Serving(
        part="products with quantised activations",
        phase=Phase.PREFILL,
        operators=("linear", "linear_swiglu"),
        kernel="low_bit_activations",
        architectures=(HOPPER,),
        when="--low-bit-activations prefill; quantises, and cuBLASLt multiplies",
        measured="prompts of Qwen3-4B in blocks, 8,192 tokens a step: 106,200 tokens/s, BF16 83,100; E4M3 rows 118,000",
        source=_LOW_BIT_ACTIVATIONS,
    ),
    Serving(
        part="products with quantised activations",
        phase=Phase.PREFILL,
        operators=("linear", "linear_swiglu"),
        kernel=CUBLASLT,
        architectures=(HOPPER,),
        when="E4M3 and INT8",
        measured="16,384 tokens of gate and up: 1,034 TFLOP/s in blocks, 1,257 in rows, INT8 1,248; BF16, ours 645",
        source="benchmarks/results/h200/low-bit-activations-products-2026-11-24.json",
    ),
    Serving(
        part="output head in FP8",
        phase=Phase.ANY,
        operators=("quantise_head", "logits"),
        kernel="lowbit_gemm_fp8_head",
        architectures=(HOPPER,),
        when="--fp8-head",
        measured="a token of Qwen3-4B in AWQ at 1 and 8 x 1024: 1.82 and 2.27 ms; with a BF16 head 1.91 and 2.36",
        source=_LOW_BIT_ACTIVATIONS,
    ),
    *(
        Serving(
            part="quantised products",
            phase=Phase.ANY,
            operators=("linear", "linear_swiglu", "grouped_linear", "experts"),
            kernel=f"grouped_gemm_{each}",
            when=when,
            measured=measured,
            source=_EXPERTS,
        )
        for each, when, measured in (
            ("fp8", "FP8", "a rank of Kimi-K2: 0.87 of 4.3 TB/s at 64 tokens"),
            ("int4", "INT4 in groups of 32", "a rank of Kimi-K2: 0.64 of 4.3 TB/s at 64 tokens"),
            ("fp4", "FP4 in groups of 32", "a rank of DeepSeek-V4-Flash: 0.52 of 4.3 TB/s at 64 tokens"),
        )
    ),
    *(
        Serving(
            part="quantised experts",
            phase=Phase.ANY,
            operators=("experts",),
            kernel=f"lowbit_experts_{each}",
            architectures=(HOPPER,),
            when=f"{codes}; not with --batch-invariant",
        )
        for each, codes in (("fp8", "E4M3"), ("int4", "INT4"), ("fp4", "E2M1"))
    ),
    Serving(
        part="quantised products",
        phase=Phase.ANY,
        operators=("upload_quantised", "upload_dequantised", "linear", "linear_swiglu", "grouped_linear"),
        kernel="quantised",
        when="where not in tiles: more than 32 tokens multiply a copy of the weight in BF16",
    ),
    Serving(
        part="quantised products",
        phase=Phase.ANY,
        operators=("upload_quantised", "upload_dequantised", "linear", "linear_swiglu"),
        kernel="lowbit_tiles",
        when="in tiles: more than 1,024 tokens, and all without lowbit_gemm, multiply a copy of the weight in BF16",
        measured="all products and norms of a Qwen3-4B step of 8,192 tokens in FP8 in 98.8 ms; in BF16 97.6 ms",
        source=_LOWBIT,
    ),
    Serving(part="embedding", phase=Phase.ANY, operators=("embedding", "residual_embedding"), kernel="embedding"),
    Serving(
        part="sampling",
        phase=Phase.ANY,
        operators=("sample",),
        kernel="sampling",
        measured="12 to 78 µs for top-k 50 and top-p 0.95 at 1 to 256 rows",
        source=_SAMPLING,
    ),
    Serving(part="log-probabilities", phase=Phase.ANY, operators=("logprobs",), kernel="logprobs"),
    Serving(part="step inputs", phase=Phase.ANY, operators=(), kernel="steps"),
    Serving(part="drafts", phase=Phase.ANY, operators=(), kernel="drafts", when="--speculative"),
    Serving(
        part="drafts",
        phase=Phase.ANY,
        operators=(
            *("hidden_before", "keep_hidden", "settle_hidden"),
            *("join_columns", "clear_rows", "put_ids", "add_logits", "draft_ids"),
        ),
        kernel="drafters",
        when="--speculative with a drafter that is a model",
    ),
    Serving(
        part="drafts",
        phase=Phase.ANY,
        operators=("draft_head", "draft_logits"),
        kernel="lowbit_gemm_fp8_head",
        architectures=(HOPPER,),
        when="head=fp8 of a drafter",
    ),
    Serving(part="drafts", phase=Phase.ANY, operators=("ngram_drafts",), kernel="ngram", when="--speculative ngram"),
    Serving(part="weights", phase=Phase.ANY, operators=("upload_weight",), kernel="weights"),
    Serving(part="weights", phase=Phase.ANY, operators=(), kernel="random_weights", when="--load-format dummy"),
    Serving(part="KV tiers", phase=Phase.ANY, operators=(), kernel="block_sums", when="--kv-tier"),
    Serving(part="sums over ranks", phase=Phase.ANY, operators=(), kernel="one_shot", when="few tokens, several GPUs"),
    Serving(part="rows for experts", phase=Phase.ANY, operators=(), kernel="expert_rows", when="data-parallel ranks"),
    Serving(part="sums over ranks", phase=Phase.ANY, operators=(), kernel="rank_arrays", when="after NCCL"),
    Serving(
        part="attention to windows and compressed entries",
        phase=Phase.ANY,
        operators=("window_attention", "append_window"),
        kernel="window_attention",
        when="keys of 512",
    ),
    Serving(
        part="compressed entries",
        phase=Phase.ANY,
        operators=("compress_windows", "compress_overlapping_windows"),
        kernel="compressor",
    ),
    Serving(
        part="indexer",
        phase=Phase.ANY,
        operators=("index_scores", "select_entries"),
        kernel="indexer",
        when="up to 64 heads of 128",
    ),
    Serving(
        part="hyper-connections",
        phase=Phase.ANY,
        operators=("hyper_streams", "hyper_read", "hyper_write", "hyper_head", "hyper_add"),
        kernel="hyper_connections",
        when="4 streams",
    ),
    Serving(
        part="RoPE of last dimensions",
        phase=Phase.ANY,
        operators=("norm_rope_tail", "rope_tail"),
        kernel="rope_tail",
    ),
)
"""In order of preference where two serve one operator."""

WITHOUT_GPU_KERNEL: tuple[str, ...] = ()
"""Operators that the CPU alone serves so far; the CUDA operators refuse them by name."""


def servings(architecture: str) -> tuple[Serving, ...]:
    """What serves on a GPU, preferred first."""
    return tuple(each for each in SERVINGS if architecture in each.architectures)


def kernels_by_part(architecture: str, *, skip: Iterable[str] = ()) -> dict[str, str]:
    """`prefill attention` -> the kernels that serve it, in order of preference; for `openinfer plan`.

    Args:
        architecture: of a GPU: `sm_90a`.
        skip: operators that a provider serves.
    """
    skipped = {*skip}
    found: dict[str, list[str]] = {}
    for each in servings(architecture):
        if each.operators and not {*each.operators} <= skipped:
            found.setdefault(_name(each), []).append(_described(each))
    return {name: "; else ".join(kernels) for name, kernels in found.items()}


def measured_by_part(architecture: str) -> Mapping[str, str]:
    """`prefill attention` -> what was measured of it, and of the alternative, with the file it is in."""
    found: dict[str, list[str]] = {}
    for each in servings(architecture):
        if each.measured:
            found.setdefault(_name(each), []).append(f"{each.kernel}: {each.measured} ({each.source})")
    return {name: "; ".join(facts) for name, facts in found.items()}


def _name(serving: Serving) -> str:
    return serving.part if serving.phase is Phase.ANY else f"{serving.phase} {serving.part}"


def _described(serving: Serving) -> str:
    return f"{serving.kernel} ({serving.when})" if serving.when else serving.kernel
