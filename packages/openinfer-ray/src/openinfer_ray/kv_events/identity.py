"""`KvIdentity`: names the blocks of a prompt as the replicas name theirs."""

from openinfer_core import EngineInfo, EngineStats, GenerateRequest, Refused
from openinfer_kv_cache import Digest, PrefixHasher


class KvIdentity:
    """Digests of prompts: by the key that all share, and what replicas say of their KV, adapters and weights.

    Args:
        info: of a replica; all have one layout.
        key: what all name their blocks with.

    Raises:
        Refused: the engine does not say what its KV is.
    """

    def __init__(self, info: EngineInfo, *, key: bytes) -> None:
        if not info.kv_layout_digest:
            raise Refused(
                "the replicas' engine does not say what names its KV, which routing by KV events needs; give "
                "--replica-routing sent"
            )
        self._hasher = PrefixHasher(info.block_size_tokens, key=key, layout_digest=info.kv_layout_digest)
        self._adapters: dict[str, bytes] = {}

    def digests(self, request: GenerateRequest) -> list[Digest]:
        """Of the prompt's whole blocks."""
        adapter = None if request.lora is None else self._adapters.get(request.lora)
        root = self._hasher.root(lora_name=request.lora, adapter_digest=adapter, cache_salt=request.cache_salt)
        return self._hasher.chain(root, request.prompt_token_ids)

    def told(self, stats: EngineStats) -> None:
        """What a replica says of its adapters and weights; between two that differ for a moment the last one counts."""
        self._adapters = {adapter.name: bytes.fromhex(adapter.digest) for adapter in stats.adapters}
        self._hasher.weights_version = stats.weights_version
