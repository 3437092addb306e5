"""What a user writes under `kv_connector_extra_config`."""

from pathlib import Path
from typing import Any

import msgspec

from openinfer_kv_offload.errors import TierConfigError

_GONE_WITH_THE_PROCESS = "host="


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an `OpenInferConnector`.

    Raises:
        TierConfigError: a value is out of range.
    """

    tiers: tuple[str, ...]
    """Settings as `open_tiers` takes them, fastest first; `{rank}` in one becomes the worker's rank."""
    digest_key_file: str | None = None
    """16 to 64 secret bytes that name blocks; the same for all processes that share a tier. Only tiers of a process's
    own memory do without: then a random key is drawn."""
    load_timeout_s: float = 5.0
    """After which what did not arrive is computed."""
    staging_bytes: int = 4 << 30
    """Pinned host memory per worker, which blocks pass through: the longest prefix that is loaded, and what is saved at
    a time."""
    model_tag: str = ""
    """To be changed with the weights, where the model's name and revision do not."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise TierConfigError('tiers is empty; write for example ["host=64GiB"]')
        if self.load_timeout_s <= 0:
            raise TierConfigError(f"load_timeout_s is {self.load_timeout_s}; it must be more than 0")
        if self.digest_key_file is None and any(not each.startswith(_GONE_WITH_THE_PROCESS) for each in self.tiers):
            raise TierConfigError(
                "digest_key_file is missing: blocks in tiers that outlive the process are found again only under the "
                "key that they were saved with; make one with: head -c 32 /dev/urandom > FILE"
            )

    def digest_key(self) -> bytes | None:
        """The key; None for a random one. Raises `TierConfigError` if the file cannot be read."""
        if self.digest_key_file is None:
            return None
        try:
            return Path(self.digest_key_file).read_bytes()
        except OSError as error:
            raise TierConfigError(f"digest_key_file: {error}") from error

    def tiers_of(self, *, rank: int) -> list[str]:
        return [each.replace("{rank}", str(rank)) for each in self.tiers]


def read_extra_config(given: dict[str, Any]) -> ConnectorSettings:
    """Checks `kv_connector_extra_config`; raises `TierConfigError` for fields unknown, missing or out of range."""
    try:
        return msgspec.convert(given, ConnectorSettings)
    except msgspec.ValidationError as error:
        fields = ", ".join(ConnectorSettings.__struct_fields__)
        raise TierConfigError(f"kv_connector_extra_config: {error}; fields are {fields}") from error
