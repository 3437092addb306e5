"""`--kv-tier`: which tiers an engine uses, what it refuses them for, and how it opens them."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from openinfer_core import BrokenPlugin, InvalidRequest, OpenInferError, Plugin, Refused, find_plugin
from openinfer_engine.options import EngineOptions
from openinfer_kv_cache import (
    KvLayout,
    KvSpec,
    KvTier,
    KvTierFactory,
    LastingTier,
    SharedTier,
    TierSettingCheck,
)
from openinfer_kv_cache.digest import MAX_KEY_BYTES, MIN_KEY_BYTES
from openinfer_kv_cache.tiers import KV_TIERS

RANK = "{rank}"  # what becomes a rank's number in a setting, as in `disk=/var/cache/kv/{rank},500GiB`
STACK = "stack"  # the plug-in that makes one tier of several; its setting is theirs, joined by `;`


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTiers:
    """Tiers that are open."""

    tier: KvTier  # a stack, if they are several
    digest_key: bytes | None  # that their blocks are found under; None for a random one of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTiers:
    """The tiers that the options name, not open."""

    settings: tuple[str, ...]  # `NAME=SETTING` each, fastest first
    plugins: tuple[Plugin, ...]
    opener: Plugin  # what is called to open them: the tier's own plug-in, or the stack's
    opener_setting: str
    key_file: str | None
    num_ranks: int = 1  # each opens them for itself
    shared: str | None = None  # name of the tier that other engines read

    @property
    def parts(self) -> dict[str, str]:
        """What `openinfer plan` shows of them."""
        shown = enumerate(zip(self.settings, self.plugins, strict=True), 1)
        ranks = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return {f"kv tier {place}": f"{setting}{ranks} ({plugin.origin})" for place, (setting, plugin) in shown}

    def open(self, layout: KvLayout, *, rank: int | None = None) -> OpenTiers:
        """Opens them for a rank, by default the layout's, whose number stands in for `{rank}` in their settings.

        Raises:
            PluginError: one failed to load, or makes no tier.
            Refused: one cannot be opened, or has no key to be found again with.
        """
        factory = cast("KvTierFactory", self.opener.load())
        with self._named(self.opener, layout):
            tier = factory(layout, _for_rank(self.opener_setting, layout.rank_index if rank is None else rank))
        self.opener.require(tier, KvTier)
        try:
            if self.shared is not None and not isinstance(tier, SharedTier):
                raise Refused(
                    f"--kv-transfer {self.shared}: the tier {tier.name} is this process's alone; name one that other "
                    "engines read, as valkey, s3 or disk"
                )
            return OpenTiers(tier=tier, digest_key=self._key_for(tier))
        except BaseException:
            tier.close()
            raise

    def check(self, layout: KvLayout) -> None:
        """Asks each tier whether its setting means anything, as `TierSettingCheck` says; raises as `open` does."""
        settings = [setting.partition("=")[2] for setting in self.settings]
        for setting, plugin in zip(settings, self.plugins, strict=True):
            factory = plugin.callable_with(2)
            with self._named(plugin, layout):
                if isinstance(factory, TierSettingCheck):
                    factory.check_setting(layout, _for_rank(setting, layout.rank_index))
                    continue
                tier = factory(layout, _for_rank(setting, layout.rank_index))
            plugin.require(tier, KvTier)
            tier.close()

    @contextlib.contextmanager
    def _named(self, plugin: Plugin, layout: KvLayout) -> Generator[None]:
        """What a tier refuses becomes a sentence with its flag, and anything else its plug-in's fault."""
        try:
            yield
        except (OpenInferError, ValueError, OSError) as error:
            hint = f"; each rank keeps a share of its own: write {RANK} where its number is to stand"
            is_shared = self.num_ranks > 1 and RANK not in self.opener_setting
            settings = " --kv-tier ".join(self.settings)
            raise Refused(f"--kv-tier {settings} ({plugin.origin}): {error}{hint if is_shared else ''}") from error
        except Exception as error:
            raise BrokenPlugin(f"{plugin.described} cannot be made: {type(error).__name__}: {error}") from error

    def _key_for(self, tier: KvTier) -> bytes | None:
        if self.key_file is not None:
            return read_digest_key(self.key_file)
        if not isinstance(tier, LastingTier):
            return None
        if tier.digest_key is None:
            raise Refused(
                f"KV tier {tier.name} outlives this process and keeps no digest key, without which nothing in it is "
                "found again: give --kv-key-file, the same for all engines that share it"
            )
        return tier.digest_key


def choose_tiers(options: EngineOptions) -> ChosenTiers | None:
    """The tiers that the options name; None without any.

    Raises:
        InvalidRequest: a setting is not `NAME=SETTING`.
        UnknownPlugin, AmbiguousPlugin: no package, or more than one, has such a tier.
    """
    if not options.kv_tier:
        return None
    names: list[str] = []
    for setting in options.kv_tier:
        name, equals, _ = setting.partition("=")
        if not (name and equals):
            raise InvalidRequest(
                f"{setting!r} is not NAME=SETTING, as in host=64GiB or disk=/var/cache/kv,500GiB", field="kv_tier"
            )
        if ";" in setting and len(options.kv_tier) > 1:
            raise InvalidRequest(f"{setting!r} has a ';', which parts the tiers of a stack", field="kv_tier")
        names.append(name)
    plugins = [find_plugin(KV_TIERS, name) for name in names]
    is_stack = len(plugins) > 1
    stacked = ";".join(options.kv_tier)
    if options.kv_transfer is not None:
        stacked += f";shared_in={options.kv_transfer}"
    return ChosenTiers(
        settings=tuple(options.kv_tier),
        plugins=tuple(plugins),
        opener=find_plugin(KV_TIERS, STACK) if is_stack else plugins[0],
        opener_setting=stacked if is_stack else options.kv_tier[0].partition("=")[2],
        key_file=options.kv_key_file,
        num_ranks=options.num_ranks,
        shared=options.kv_transfer,
    )


def _for_rank(setting: str, rank: int) -> str:
    return setting.replace(RANK, str(rank))


def require_snapshots(spec: KvSpec, num_snapshots: int) -> None:
    """Refuses a model with recurrent states of which no copies are kept: prefixes end where copies are."""
    if spec.slots and not num_snapshots:
        states = ", ".join(group.name for group in spec.slots)
        raise Refused(
            f"--kv-tier: the model keeps recurrent states ({states}) beside its KV, a prefix is of no use without a "
            "copy of them, and state_snapshot_bytes has room for none; give it more, or leave --kv-tier out"
        )


def read_digest_key(key_file: str) -> bytes:
    """The bytes that blocks are named with.

    Raises:
        InvalidRequest: the file cannot be read, or has too few or too many bytes.
    """
    path = Path(key_file)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"--kv-key-file {path}: {error.strerror}", field="kv_key_file") from error
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise InvalidRequest(
            f"--kv-key-file {path} has {len(key)} bytes; it must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}, for example "
            f"those of: head -c 32 /dev/urandom > {path}",
            field="kv_key_file",
        )
    return key
