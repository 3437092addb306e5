"""The recorded models, and a harness that runs one with batches made by hand."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine.testing import FamilyHarness

sys.path.insert(0, str(Path(__file__).parent))  # the helpers of these tests are imported by name
FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.fixture(scope="session", params=FIXTURE_NAMES)
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each recorded model in turn."""
    return FIXTURES / request.param


@pytest.fixture
def fixtures() -> Path:
    """The folder of recorded models."""
    return FIXTURES


@pytest.fixture
def harness() -> partial[FamilyHarness]:
    """Takes the folder of a model, and what else `FamilyHarness` does."""
    return partial(FamilyHarness, DeepseekV4Definition())


@pytest.fixture
def published() -> dict[str, Any]:
    """The keys of DeepSeek-V4-Flash's `config.json` that shape it."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
        "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0],
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
        },
        "attention_bias": False,
    }
