"""The reference of the golden gate: a random checkpoint of a published shape, and transformers' log-probabilities.

transformers runs the same BF16 weights in float32, which is the truth, and in BF16, which shows what the format costs.
The text model of Qwen3.5 runs by transformers' plain PyTorch code for linear attention, in float32 even in BF16.
RoPE's frequencies stay in float32 in both: `model.to(torch.bfloat16)` would round that buffer too, and turns angles by
up to a radian at a thousand tokens; so the models are made in their dtype instead, and `_check_frequencies` looks.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-4b": COMMON | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": COMMON | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 32768,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000,
            "rope_type": "yarn",
        },
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    # Windows are shorter than published (4,096 and 1,024), so that sequences of the gate are longer than they.
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "dtype": "bfloat16",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": 100,
        "tie_word_embeddings": True,
        "vocab_size": 256000,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 100,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
}
GEMMA = ("gemma2", "gemma3_text")

EMBEDDING_STD = 1.0
QK_GAIN = 2.0
"""Mean of the norm weights of Q and K; where there are none, what the projection of Q is multiplied by. Scores of
attention have its square (or itself) as standard deviation, so that each token looks at a few others: with flat
attention, a wrong position would hardly be seen."""
DECAYS, STEPS = (1.0, 16.0), (1e-3, 0.1)
"""Of linear attention, where training begins (Gu and Dao 2023, "Mamba", section 3.6): `exp(A_log)`, drawn evenly, times
the softplus of `dt_bias`, whose logarithm is drawn evenly, is what a state forgets per token. Some heads remember
thousands of tokens."""
NUM_SUCCESSORS = 8
SUCCESSOR_LOGITS = (12.0, 24.0)
"""What a token's successors gain over what the context gives every token, drawn evenly."""


class Scores(NamedTuple):
    """Log-probabilities after each position of a sequence, `[positions, vocabulary]` float32 on the device."""

    truth: torch.Tensor
    bfloat16: torch.Tensor


class Reference:
    """transformers in float32 and in BF16 on one random checkpoint, which is written to `folder`.

    Float32 lies on the last GPU that the process sees: with two, models fit of which it takes half of one.

    Args:
        folder: where `config.json` and `model.safetensors` go.
        config: of the model.
        logit_std: standard deviation of what the context adds to each logit.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, logit_std: float) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        made = AutoConfig.for_model(**config)
        weights = random_weights(made, logit_std=logit_std)
        save_file(published(weights), folder / "model.safetensors", metadata={"format": "pt"})
        self._bfloat16 = _model(made, weights, torch.bfloat16, device="cuda:0")
        self._float32 = _model(made, weights, torch.float32, device=f"cuda:{torch.cuda.device_count() - 1}")

    def score(self, ids: list[int]) -> Scores:
        """Teacher-forced, one sequence at a time."""
        with torch.no_grad():
            truth, rounded = (
                model(torch.tensor([ids], device=model.device)).logits[0].float().to("cuda:0")
                for model in (self._float32, self._bfloat16)
            )
            return Scores(torch.log_softmax(truth, -1), torch.log_softmax(rounded, -1))


def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of checkpoints, which have experts one by one where transformers has them stacked."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        prefix, _, part = name.partition(".experts.")
        if part == "gate_up_proj":
            for index, expert in enumerate(value):
                gate, up = expert.chunk(2)
                found[f"{prefix}.experts.{index}.gate_proj.weight"] = gate.clone()
                found[f"{prefix}.experts.{index}.up_proj.weight"] = up.clone()
        elif part == "down_proj":
            found |= {f"{prefix}.experts.{i}.down_proj.weight": expert.clone() for i, expert in enumerate(value)}
        else:
            found[name] = value
    return found


def random_weights(config: PreTrainedConfig, *, logit_std: float) -> dict[str, torch.Tensor]:
    """BF16 weights by their published names, the same for every run on one kind of GPU.

    They are drawn as for training, so that rounding is amplified no more than in a trained model: with a variance of
    1 / inputs, and 1 / (2 layers) of that for what is added to the residual stream (Radford et al. 2019, section 2.3).
    Such a model says nothing of its last token, so its head gets what a trained one has: a few successors of each token
    are likely, and the context decides among them. The last norm's random signs keep that apart from the token itself
    where embedding and head are one matrix.
    """
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator = torch.Generator("cuda").manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        random = torch.randn(shape, generator=generator, device="cuda")
        if name.endswith(("A_log", "dt_bias")):
            weights[name] = _decay(name, shape, generator)
        elif len(shape) == 1:
            weights[name] = _norm_gain(name, config) * (1 + 0.2 * random)
        else:
            without_norms = config.model_type in ("deepseek_v2", "gemma2")
            gain = QK_GAIN if without_norms and name.endswith("q_proj.weight") else 1.0
            weights[name] = random * _std(name, shape, config) * gain
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    head_std = _std("lm_head.weight", head.shape, config)
    signs = torch.randn(config.hidden_size, generator=generator, device="cuda").sign()
    weights["model.norm.weight"] *= signs * logit_std / (head_std * config.hidden_size**0.5)
    per_logit = head_std / (logit_std * config.hidden_size**0.5)
    directions = embedding * signs * (per_logit / _std("model.embed_tokens.weight", embedding.shape, config))
    for _ in range(NUM_SUCCESSORS):
        tokens = torch.randperm(len(head), generator=generator, device="cuda")
        gains = torch.empty(len(head), 1, device="cuda").uniform_(*SUCCESSOR_LOGITS, generator=generator)
        head.index_add_(0, tokens, directions * gains)
    # whose norms add one to their weights, but for the one of linear attention
    if config.model_type == "qwen3_5_text" or config.model_type in GEMMA:
        for name in shapes:
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                weights[name] -= 1.0
    return {name: value.bfloat16() for name, value in weights.items()}


def _norm_gain(name: str, config: PreTrainedConfig) -> float:
    """The mean of a norm's weights."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return QK_GAIN
    # Gemma norms what is added to the residual stream, whose variance is that norm's then, not the projection's.
    is_added = config.model_type in GEMMA and name.endswith(
        ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    )
    return (2 * config.num_hidden_layers) ** -0.5 if is_added else 1.0


def _decay(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.empty(shape, device="cuda").uniform_(generator=generator)
    if name.endswith("A_log"):
        return (DECAYS[0] + (DECAYS[1] - DECAYS[0]) * drawn).log()
    return (STEPS[0] * (STEPS[1] / STEPS[0]) ** drawn).expm1().log()  # the inverse of softplus


def _std(name: str, shape: torch.Size, config: PreTrainedConfig) -> float:
    if "embed_tokens" in name or ("lm_head" in name and config.tie_word_embeddings):
        # Gemma multiplies the embedding by the root of the hidden size.
        return EMBEDDING_STD / (config.hidden_size**0.5 if config.model_type in GEMMA else 1)
    adds_to_residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj"))
    return shape[-1] ** -0.5 * ((2 * config.num_hidden_layers) ** -0.5 if adds_to_residual else 1)


def _model(
    config: PreTrainedConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype, *, device: str
) -> PreTrainedModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            # Gemma-2 caps the scores of attention, which the other implementations leave out.
            attention = "eager" if config.model_type in GEMMA else None
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
    missing, unexpected = model.load_state_dict(
        {name: value.to(device, dtype) for name, value in weights.items()}, strict=False, assign=True
    )
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), missing
    model.tie_weights()
    if config.model_type in GEMMA:  # trained with the scale as BF16 holds it, which float32 would not round
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5).bfloat16().to(device, dtype)
    _check_frequencies(model, config)
    return model.eval()


def _check_frequencies(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Every parameter is of one dtype; RoPE's frequencies are those of float32."""
    rotary, parameters = model.model.rotary_emb, config.rope_parameters
    if "rope_type" in parameters:
        _check_rope(rotary.inv_freq, config.head_dim, parameters)
    else:  # of each kind of layer
        for kind, of_kind in parameters.items():
            _check_rope(getattr(rotary, f"{kind}_inv_freq"), config.head_dim, of_kind)
    if config.tie_word_embeddings:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def _check_rope(found: torch.Tensor, head_dim: int, parameters: dict[str, Any]) -> None:
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    expected = parameters["rope_theta"] ** -steps
    assert found.dtype == torch.float32
    if parameters["rope_type"] == "linear":
        expected = expected / parameters["factor"]
    if parameters["rope_type"] == "yarn":  # whose fastest pairs are left as they are
        found, expected = found[: len(expected) // 4], expected[: len(expected) // 4]
    assert torch.allclose(found.double().cpu(), expected, rtol=1e-6, atol=0)
