"""Records Gemma-2 and Gemma-3 models and the logits that transformers computes with them, in float32, and sinks.

The scale of the embedding is rounded to BF16, as transformers does where it loads these checkpoints in their own dtype;
all else is float32. Models of real widths have the weights of `--load-format dummy`, so that no weight is kept.
`sinks.npz` has inputs and outputs of gpt-oss's attention.

Usage, with packages/*/src and examples/openinfer-gemma/src in PYTHONPATH: python tools/golden/gemma.py [FOLDER]
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from recording import begin, begin_model, record, write
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from openinfer_engine.weights.dummy import DummyWeights
from openinfer_gemma.family import GemmaDefinition

FIXTURES = Path(__file__).parents[2] / "examples/openinfer-gemma/tests/fixtures"
SINKS = Path(__file__).parents[2] / "packages/openinfer-kernels/tests/attention/sinks.npz"
SEQUENCE_TOKENS = (150, 41, 7)
MOST_BYTES = 600_000

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA2 = COMMON | {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA3 = COMMON | {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
OF_REAL_WIDTH = {"vocab_size": 512, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2_2B = (
    GEMMA2
    | OF_REAL_WIDTH
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
GEMMA3_1B = (
    GEMMA3
    | OF_REAL_WIDTH
    | {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    }
)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4}


def main() -> None:
    folder = begin(FIXTURES)
    for seed, (name, make) in enumerate(MODELS.items()):
        target = folder / name
        begin_model(target, seed=seed)
        model = make().eval()
        randomise(model)
        recorded = record(model, SEQUENCE_TOKENS, vocab_size=COMMON["vocab_size"])
        model.bfloat16().save_pretrained(target)
        write(target, recorded, most_bytes=MOST_BYTES)
    for name, model in {"gemma2_2b_widths": make_gemma2(GEMMA2_2B), "gemma3_1b_widths": make_gemma3(GEMMA3_1B)}.items():
        target = folder / name
        begin_model(target, seed=0)
        target.mkdir(parents=True)
        model.config.to_json_file(target / "config.json", use_diff=False)
        use_dummy_weights(model.eval(), target)
        write(target, record(model, (60, 33, 9), vocab_size=512, every=10), most_bytes=MOST_BYTES)
    torch.manual_seed(0)
    np.savez_compressed(SINKS, **record_sinks())


def make_vision_language() -> Any:
    """The layout of most published checkpoints of Gemma-3: the text model beside a vision tower."""
    text = GEMMA3 | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(text_config=text, vision_config=VISION | IMAGES, mm_tokens_per_image=4, image_token_index=255)
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")  # noqa: SLF001


def make_gemma2(config: dict[str, Any]) -> Any:
    return Gemma2ForCausalLM(Gemma2Config(**config, dtype="bfloat16", attn_implementation="eager"))


def make_gemma3(config: dict[str, Any]) -> Any:
    return Gemma3ForCausalLM(Gemma3TextConfig(**config, dtype="bfloat16", attn_implementation="eager"))


MODELS = {
    "gemma2": lambda: make_gemma2(GEMMA2),
    "gemma3": lambda: make_gemma3(GEMMA3),
    "gemma3_images": make_vision_language,
}


def randomise(model: Any) -> None:
    """Weights that let every part of the model matter: peaked attention, and norms far from neutral."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values = torch.empty_like(parameter).uniform_(0.0, 1.0)
        elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            values = torch.empty_like(parameter).uniform_(0.5, 1.5)  # else the embedding outweighs what layers add
        elif name.endswith("norm.weight"):
            values = torch.empty_like(parameter).uniform_(-0.5, 0.5)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        else:
            values = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5
        parameter.copy_(values.bfloat16().float())
    round_embedding_scale(model)


def use_dummy_weights(model: Any, folder: Path) -> None:
    """What `DummyWeights` makes of the model in `folder`."""
    definition = GemmaDefinition()
    shapes = definition.tensors(definition.parse(json.loads((folder / "config.json").read_text())))
    weights = DummyWeights(shapes, rank=0, size=1)
    for name, parameter in model.named_parameters():
        bits = weights.read(name).astype(np.uint32) << 16
        parameter.copy_(torch.from_numpy(bits.view(np.float32)))
    round_embedding_scale(model)


def round_embedding_scale(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("embed_scale"):
            buffer.copy_(buffer.bfloat16().float())


def record_sinks() -> dict[str, np.ndarray]:
    """Queries, keys, values and sinks of one sequence, and what gpt-oss's attention makes of them."""
    heads, kv_heads, head_dim, tokens, window, scale = 4, 2, 64, 24, 7, 64**-0.5
    q = (torch.randn(1, heads, tokens, head_dim) * 2).bfloat16().float()
    k, v = torch.randn(2, 1, kv_heads, tokens, head_dim).bfloat16().float()
    sinks = torch.linspace(-3, 4, heads)
    attention = SimpleNamespace(sinks=sinks, num_key_value_groups=heads // kv_heads, training=False)
    causal = torch.full((tokens, tokens), -torch.inf).triu(1)
    config = Gemma2Config(**GEMMA2 | {"sliding_window": window}, attn_implementation="eager")
    windowed = create_sliding_window_causal_mask(
        config=config, inputs_embeds=torch.zeros(1, tokens, 1), attention_mask=None, past_key_values=None
    )
    recorded = {"q": q[0].transpose(0, 1), "k": k[0], "v": v[0], "sinks": sinks}
    for name, mask in (("full", causal[None, None]), ("windowed", windowed)):
        out, _ = eager_attention_forward(attention, q, k, v, mask, scaling=scale)
        recorded[name] = out[0].reshape(tokens, -1)
    return {name: each.contiguous().numpy() for name, each in recorded.items()} | {
        "scale": np.float64(scale),
        "window": np.int64(window),
    }


if __name__ == "__main__":
    main()
