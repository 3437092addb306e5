"""A KV connector for vLLM: its users get our tiers by configuration. torch and vLLM are theirs, and only needed here.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OpenInferConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "openinfer_kv_offload.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": ["host=64GiB"]}}'

The scheduler's side asks, the workers' side has the tiers:

    scheduler   query (digests) ─┐                        ┌─ answer: how many blocks are there
    worker                       └─► find, hold the hit ──┘
    scheduler   load (blocks) ─► tier → staging → KV pool ─► finished, or blocks that did not complete
    scheduler   save (digests, blocks) ─► KV pool → staging → tier
"""

from openinfer_kv_offload.vllm.connector import OpenInferConnector

__all__ = ["OpenInferConnector"]
