"""Model families: which of them serves a `config.json`, found through the entry-point group `openinfer.models`."""

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from openinfer_core.engine import EngineHandle
from openinfer_core.errors import BrokenPlugin, InvalidCheckpoint, OpenInferError, UnclaimedModel, brought_by
from openinfer_core.plugins import Plugin

KNOWN_FAMILIES: Mapping[str, str] = {
    "llama": "openinfer-llama",
    "mistral": "openinfer-llama",
    "qwen3": "openinfer-qwen3",
    "qwen3_moe": "openinfer-qwen3",
    "qwen3_5": "openinfer-qwen35",
    "qwen3_5_text": "openinfer-qwen35",
    "qwen3_5_moe": "openinfer-qwen35",
    "qwen3_5_moe_text": "openinfer-qwen35",
    "deepseek_v2": "openinfer-deepseek",
    "deepseek_v3": "openinfer-deepseek",
    "deepseek_v4": "openinfer-deepseek-v4",
    "kimi_k2": "openinfer-kimi-k2",
    "kimi_k25": "openinfer-kimi-k2",
}
"""`model_type` -> the distribution that serves it, for the message when it is not installed."""


class ModelFamily(Protocol):
    """One architecture. The entry point's object is an instance, or a class without arguments."""

    @property
    def name(self) -> str:
        """Its name in messages and in `--family`."""
        ...

    @property
    def options_type(self) -> type[msgspec.Struct]:
        """The Struct of what a user may set; field names are the command's flags (`_` becomes `-`)."""
        ...

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not, in one sentence.

        A config of another architecture is refused with a sentence that begins with `not `: it is not this
        family's business. Any other sentence means: this family's architecture, asked in a way it does not serve.
        """
        ...

    def plan(self, model_dir: Path, options: msgspec.Struct) -> "FamilyPlan":
        """What `launch` would do, resolved without loading weights.

        Raises:
            InvalidCheckpoint: the folder is incomplete or contradicts its config.
            Refused: the options cannot be served.
        """
        ...

    def launch(self, model_dir: Path, options: msgspec.Struct) -> EngineHandle:
        """Loads the model and returns its running engine.

        Raises:
            InvalidCheckpoint: the folder is incomplete or contradicts its config.
            Refused: the options cannot be served (memory, devices, plug-ins).
        """
        ...


@runtime_checkable
class PlansForGpu(Protocol):
    """A `ModelFamily` that also plans for GPUs that are not here."""

    def plan_for_gpu(self, model_dir: Path, options: msgspec.Struct, *, gpu: str) -> "FamilyPlan":
        """`ModelFamily.plan` for GPUs of that name (`h100-80g`); a folder with a `config.json` alone will do.

        Raises:
            InvalidRequest: the name is not known.
            Refused: the options cannot be served, or the model does not fit.
        """
        ...


class RankLedger(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank would take of its device, were there so many of them."""

    ranks: int
    """Ranks of the whole group, each with a device of its own."""
    weights_bytes: int = 0
    workspace_bytes: int = 0
    """Activations, graphs, recurrent states and all else next to weights and KV."""
    kv_cache_bytes: int = 0
    kv_cache_tokens: int = 0
    """That the KV cache holds; each rank has its share of every token's."""
    refusal: str | None = None
    """Why it is not possible: the model cannot be cut so, or does not fit; then what is not known is 0."""


class FamilyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved composition of a family's engine, for `openinfer plan`."""

    model_type: str
    """The folder of the `config.json`."""
    parts: dict[str, str]
    """What supplies each part: `scheduler` -> `token-budget (openinfer-engine 0.1.0)`."""
    kernels: dict[str, str]
    """Which implementation serves each phase of the model."""
    memory_bytes: dict[str, int]
    """Memory ledger of one rank: weights, kv_cache, workspace."""
    limits: dict[str, int]
    """max_model_tokens, num_blocks, block_size_tokens, max_num_seqs, max_step_tokens."""
    measured: dict[str, str] = {}
    """What was measured of kernels, and of what could stand in their place; by the keys of `kernels`, for reading."""
    by_ranks: tuple[RankLedger, ...] = ()
    """For several numbers of ranks, whatever was asked for."""
    distributions: tuple[str, ...] = ()
    """Names of the distributions that supply the parts: a lock holds their files."""


def load_family(plugin: Plugin) -> ModelFamily:
    """The family that an entry point of `openinfer.models` offers: its object, or an instance of its class.

    Raises:
        PluginError: it was written for another contract, failed to load, or is no family.
    """
    return plugin.instance(ModelFamily)


def check_model_file(path: Path) -> None:
    """Called before a file of a model folder is opened: opening a named pipe would wait for ever.

    Raises:
        InvalidCheckpoint: it is no regular file, nor a link to one.
        OSError: there is none, or it cannot be asked about.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise InvalidCheckpoint(f"{path} is no regular file")


def read_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises:
        InvalidCheckpoint: the folder or file is missing, or is not a JSON object.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise InvalidCheckpoint(f"{model_dir} has no config.json; a Hugging Face model folder is needed")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidCheckpoint(f"{path} is not a JSON object: {error}") from error


def claim(config: Mapping[str, Any], plugins: Iterable[Plugin]) -> tuple[ModelFamily, Plugin]:
    """The one family that serves a config, and the plug-in that it came from.

    A family that cannot be loaded or asked claims nothing. It is told where no other one claims the config, and
    logged where one does, so that it stands in no other model's way.

    Raises:
        UnclaimedModel: none does (the message has each family's reason, and the package to install if it is
            known), or more than one does.
    """
    claiming: list[tuple[ModelFamily, Plugin]] = []
    refusals: list[tuple[str, str]] = []
    distributions: dict[str, str | None] = {}  # of the families that were asked
    broken: list[str] = []
    for plugin in plugins:
        try:
            family = load_family(plugin)
            refusal = _refusal_of(family, plugin, config)
        except OpenInferError as error:
            broken.append(str(error))
            continue
        if refusal is None:
            claiming.append((family, plugin))
        else:
            refusals.append((family.name, refusal))
            distributions[family.name] = plugin.distribution
    model_type = config.get("model_type")
    if not claiming:
        message = _unclaimed(model_type, refusals, distributions, is_complete=not broken)
        raise UnclaimedModel("; ".join([message, *broken]))
    if len(claiming) > 1:
        raise UnclaimedModel(_claimed_by_several(model_type, claiming))
    if broken:
        import logging  # which takes longer to import than all of this package, and is seldom needed

        for message in broken:
            logging.getLogger("openinfer.plugins").warning("%s", message)
    return claiming[0]


def _refusal_of(family: ModelFamily, plugin: Plugin, config: Mapping[str, Any]) -> str | None:
    try:
        refusal: Any = family.refusal(config)
    except Exception as error:
        raise BrokenPlugin(
            f"{plugin.described} failed when it was asked about the model: {type(error).__name__}: {error}"
        ) from error
    if refusal is None or isinstance(refusal, str):
        return refusal
    raise BrokenPlugin(
        f"{plugin.described} answered {refusal!r} when it was asked about the model: neither None nor text"
    )


def _claimed_by_several(model_type: object, claiming: Sequence[tuple[ModelFamily, Plugin]]) -> str:
    names = ", ".join(sorted(f"{plugin.name} ({plugin.origin})" for _, plugin in claiming))
    if len({plugin.name for _, plugin in claiming}) == len(claiming):
        return f"model_type {model_type!r} is claimed by {names}; choose one with --family NAME"
    return f"model_type {model_type!r} is claimed by {names}; two have one name: uninstall all but one of these"


def _served(distributions: Mapping[str, str | None]) -> str:
    if not distributions:
        return "none is installed"
    packages = set(distributions.values())
    types = {model_type for model_type, package in KNOWN_FAMILIES.items() if package in packages}
    others = {name for name, package in distributions.items() if package not in KNOWN_FAMILIES.values()}
    return (
        f"served here are {', '.join(sorted(types | others))}: take a model of one of these types, or write a family "
        "for this one (docs/reference/add-a-model.md)"
    )


def _unclaimed(
    model_type: object,
    refusals: list[tuple[str, str]],
    distributions: Mapping[str, str | None],
    *,
    is_complete: bool,
) -> str:
    concerned = [f"{name}: {text}" for name, text in refusals if not text.startswith("not ")]
    if concerned:
        return "; ".join(concerned)
    lines = [f"no installed family serves model_type {model_type!r}"]
    package = KNOWN_FAMILIES.get(str(model_type))
    installed = sorted(name for name, _ in refusals)
    if package is not None and is_complete and package.removeprefix("openinfer-") not in installed:
        lines.append(f"{package} does: {brought_by()}")
    elif is_complete:
        # A family that only repeats the type says nothing of why this model is not served.
        lines += [f"{name}: {text}" for name, text in sorted(refusals) if repr(model_type) not in text]
        lines.append(_served(distributions))
    return "; ".join(lines)
