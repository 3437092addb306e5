"""The reference of the golden gate: a random checkpoint of a published shape, and transformers' log-probabilities.

transformers runs the same BF16 weights in float32, which is the truth, and in BF16, which shows what the format costs.
RoPE's frequencies stay in float32 in both: `model.to(torch.bfloat16)` would round that buffer too, and turns angles by
up to a radian at a thousand tokens; so the models are made in their dtype instead, and `_check_frequencies` looks.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

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
}

EMBEDDING_STD = 0.5
"""As large as all that the layers add to it."""


class Scores(NamedTuple):
    """Log-probabilities after each position of a sequence, `[positions, vocabulary]` float32 on the device."""

    truth: torch.Tensor
    bfloat16: torch.Tensor


class Reference:
    """transformers in float32 and in BF16 on one random checkpoint, which is written to `folder`.

    Weights are drawn as for training, so that rounding is amplified no more than in a trained model: `fan_in ** -0.5`,
    and for what is added to the residual stream another `(2 * layers) ** -0.5` (Radford et al. 2019, section 2.3). The
    last norm's weights have random signs: a tied head would otherwise say the token that it was given.

    Args:
        folder: where `config.json` and `model.safetensors` go.
        config: of the model.
        qk_gain: mean of the norm weights of Q and K: scores of attention have its square as standard deviation.
        logit_std: standard deviation of the logits; 5 makes the likeliest of 151,936 tokens about a third likely.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, qk_gain: float, logit_std: float) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        made = Qwen3Config(**config)
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in Qwen3ForCausalLM(made).named_parameters()}
        generator = torch.Generator("cuda").manual_seed(0)
        head_std = EMBEDDING_STD if made.tie_word_embeddings else made.hidden_size**-0.5
        last_norm = logit_std / (head_std * made.hidden_size**0.5)
        weights: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            random = torch.randn(shape, generator=generator, device="cuda")
            if name == "model.norm.weight":
                weights[name] = last_norm * random.sign() * (1 + 0.2 * random.abs())
            elif len(shape) == 1:
                weights[name] = (qk_gain if "_norm.weight" in name and "self_attn" in name else 1) * (1 + 0.2 * random)
            else:
                weights[name] = random * _std(name, shape, made)
            weights[name] = weights[name].bfloat16()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._bfloat16 = _model(made, weights, torch.bfloat16)
        self._float32 = _model(made, weights, torch.float32)

    def score(self, ids: list[int]) -> Scores:
        """Teacher-forced, one sequence at a time."""
        given = torch.tensor([ids], device="cuda")
        with torch.no_grad():
            truth, rounded = (model(given).logits[0].float() for model in (self._float32, self._bfloat16))
            return Scores(torch.log_softmax(truth, -1), torch.log_softmax(rounded, -1))


def _std(name: str, shape: torch.Size, config: Qwen3Config) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_STD
    adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return shape[-1] ** -0.5 * ((2 * config.num_hidden_layers) ** -0.5 if adds_to_residual else 1)


def _model(config: Qwen3Config, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Qwen3ForCausalLM:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    missing, unexpected = model.load_state_dict(
        {name: value.to(dtype) for name, value in weights.items()}, strict=False, assign=True
    )
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), missing
    model.tie_weights()
    _check_frequencies(model, config)
    return model.eval()


def _check_frequencies(model: Qwen3ForCausalLM, config: Qwen3Config) -> None:
    """Every parameter is of one dtype; RoPE's frequencies are those of float32."""
    found = model.model.rotary_emb.inv_freq
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    expected = config.rope_parameters["rope_theta"] ** -steps
    assert found.dtype == torch.float32
    assert torch.allclose(found.double().cpu(), expected, rtol=1e-6, atol=0)
    if config.tie_word_embeddings:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
