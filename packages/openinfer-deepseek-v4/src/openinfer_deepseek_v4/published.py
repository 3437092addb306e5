"""The two layouts of a published `config.json`: that of the checkpoint's authors, and that of transformers."""

from collections.abc import Mapping
from typing import Any, cast

from openinfer_kernels import WeightFormat

MODEL_TYPE = "deepseek_v4"

_KIND_OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """One layout of both: kinds of layers by name, ratios and rotary embeddings one by one, what is stored.

    Raises:
        KeyError: a ratio of tokens per entry that no layer has.
    """
    layers = config.get("num_hidden_layers", 0)
    rates = cast("dict[str, Any]", config.get("compress_rates") or {})
    return dict(config) | {
        "layer_types": _layer_types(config)[:layers],
        "mlp_layer_types": _mlp_layer_types(config, layers)[:layers],
        "sparse_ratio": rates.get("compressed_sparse_attention", _RATIOS["compressed_sparse_attention"]),
        "heavy_ratio": rates.get("heavily_compressed_attention", _RATIOS["heavily_compressed_attention"]),
        "main_rope": rope_fields(config, "main"),
        "compress_rope": rope_fields(config, "compress"),
        "storage": _storage(config),
    }


def rope_fields(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The rotary embedding of sliding layers (`main`) or of all others (`compress`), for `RopeParameters`.

    YaRN's magnitude is 1 whatever its factor: the model is trained so.
    """
    given = cast("dict[str, Any]", config.get("rope_parameters") or {})
    scaling = cast("dict[str, Any]", config.get("rope_scaling") or {})
    fields: dict[str, Any]
    if label in given:
        fields = dict(given[label])
    elif label == "main":
        fields = {"rope_theta": config.get("rope_theta")}
    else:
        fields = {**given, **scaling, "rope_theta": config.get("compress_rope_theta")}
    fields.pop("partial_rotary_factor", None)
    if fields.get("rope_type", fields.get("type")) == "yarn":
        fields["attention_factor"] = 1.0
    return fields


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    if "layer_types" in config:
        return list(config["layer_types"])
    ratios = cast("list[int]", config.get("compress_ratios") or [])
    return [_KIND_OF_RATIO[ratio] for ratio in ratios]


def _mlp_layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    if "mlp_layer_types" in config:
        return list(config["mlp_layer_types"])
    by_table = config.get("num_hash_layers", 0)
    return ["hash_moe"] * by_table + ["moe"] * (layers - by_table)


def _storage(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says of quantisation; the tensors have the last word (`stored.py`)."""
    if not config.get("quantization_config"):
        return {}
    fp4 = config.get("expert_dtype") == "fp4"
    return {
        "linears": WeightFormat.FP8_BLOCKS,
        "output_a": WeightFormat.FP8_BLOCKS,
        "experts": WeightFormat.FP4_GROUPS if fp4 else WeightFormat.FP8_BLOCKS,
    }
