"""Tiers on servers from what a user writes: `valkey=valkey://10.0.0.7:6379,64GiB` or `s3=s3://bucket/prefix,10TiB`."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from openinfer_core.errors import brought_by
from openinfer_kv_cache import KvLayout
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.remote.tier import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.setting_fields import TierOpener, convert, parse_fields, parse_size

OPENINFER_CONTRACT = 1

_VALKEY = "valkey=valkey://10.0.0.7:6379/0,64GiB"
_S3 = "s3=s3://bucket/prefix,10TiB"
_VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
_Opened = TypeVar("_Opened")


class _ServerFields(RemoteTierOptions, frozen=True, kw_only=True):
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout_s <= 0:
            raise TierConfigError(f"timeout_s is {self.timeout_s}; it must be more than 0")


class _ValkeyFields(_ServerFields, frozen=True, kw_only=True):
    ttl_s: float | None = None
    password_file: str | None = None


class _S3Fields(_ServerFields, frozen=True, kw_only=True):
    timeout_s: float = 10.0
    endpoint: str | None = None
    region: str | None = None


def _parse_valkey(setting: str) -> tuple[str, _ValkeyFields]:
    url, fields = _split(setting, example=_VALKEY)
    if url.partition("://")[0] not in _VALKEY_SCHEMES:
        raise TierConfigError(f"{url} is no address of a Valkey server; write for example {_VALKEY}")
    if urlsplit(url).password is not None:
        raise TierConfigError(
            "a password in the address is shown wherever the address is; write password_file=PATH instead"
        )
    options = convert(fields, _ValkeyFields)
    if options.ttl_s is not None and options.ttl_s <= 0:
        raise TierConfigError(f"ttl_s is {options.ttl_s}; it must be more than 0, or absent")
    return url, options


def _open_valkey(layout: KvLayout, parsed: tuple[str, _ValkeyFields]) -> RemoteTier:
    url, options = parsed
    password = None if options.password_file is None else _read_secret(options.password_file)

    def connect() -> ObjectStore:
        from openinfer_kv_offload.remote.valkey_store import ValkeyStore

        return ValkeyStore(url, timeout_s=options.timeout_s, ttl_s=options.ttl_s, password=password)

    return _open(layout, _with_extra(connect, extra="valkey"), options, name="valkey")


def _parse_s3(setting: str) -> tuple[str, _S3Fields]:
    url, fields = _split(setting, example=_S3)
    scheme, _, place = url.partition("://")
    bucket, _, prefix = place.partition("/")
    if scheme != "s3" or not bucket:
        raise TierConfigError(f"{url} is no bucket; write for example {_S3}")
    if prefix:
        if "prefix" in fields:
            raise TierConfigError(f"{url} has a prefix already; write it once")
        fields["prefix"] = prefix
    return bucket, convert(fields, _S3Fields)


def _open_s3(layout: KvLayout, parsed: tuple[str, _S3Fields]) -> RemoteTier:
    bucket, options = parsed

    def connect() -> ObjectStore:
        from openinfer_kv_offload.remote.s3_store import S3Store

        return S3Store(bucket, endpoint=options.endpoint, region=options.region, timeout_s=options.timeout_s)

    return _open(layout, _with_extra(connect, extra="s3"), options, name="s3")


def _split(setting: str, *, example: str) -> tuple[str, dict[str, int | str]]:
    url, *rest = setting.split(",")
    if not rest:
        raise TierConfigError(f"{setting!r} needs an address and a size; write for example {example}")
    return url, parse_fields({"budget_bytes": parse_size(rest[0])}, rest[1:])


def _open(layout: KvLayout, store: ObjectStore, options: _ServerFields, *, name: str) -> RemoteTier:
    try:
        return RemoteTier(layout, store, options, name=name)
    except BaseException:
        store.close()
        raise


def _with_extra(connect: Callable[[], _Opened], *, extra: str) -> _Opened:
    try:
        return connect()
    except ModuleNotFoundError as missing:
        raise TierConfigError(
            f"this tier needs the package {missing.name} (extra {extra}): {brought_by('--offload')}"
        ) from missing


def _read_secret(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise TierConfigError(f"password_file: {error}") from error


# `URL,SIZE[,prefix=P][,access=write|read][,ttl_s=S][,password_file=PATH]` and what `open_s3` takes of both. Without the
# extra `valkey`, and for a server that cannot be had, opening raises.
open_valkey = TierOpener(_parse_valkey, _open_valkey)

# `s3://BUCKET[/PREFIX],SIZE` and fields, each `,NAME=VALUE`: `endpoint=URL` and `region=R` of the service;
# `access=write|read`, `connections=N`, `refresh_s=S` and `timeout_s=S` as in `RemoteTierOptions` and the stores.
open_s3 = TierOpener(_parse_s3, _open_s3)
