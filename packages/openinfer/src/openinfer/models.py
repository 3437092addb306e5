"""From what a user calls a model to a folder and the family that serves it."""

from pathlib import Path

from openinfer.hub import smollm2
from openinfer.hub.cache import MAIN, CachedRepo, HubName, is_revision
from openinfer_core import ModelFamily, claim, find_plugin, list_plugins, load_family, read_config
from openinfer_core.errors import (
    BrokenPlugin,
    InvalidCheckpoint,
    InvalidRequest,
    OpenInferError,
    Refused,
    UnknownPlugin,
)
from openinfer_core.plugins import CHECKPOINTS, MODEL_FILES, MODELS, PLUGIN_ERRORS, Lister, Plugin, installed


def find_model_dir(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    family: str | None = None,
    lister: Lister = installed,
) -> Path:
    """The folder of a model.

    Args:
        model: the path of a folder or of a GGUF file, the name of a checkpoint that an installed package brings
            (`tiny`), or of a repository of the Hugging Face hub (`Qwen/Qwen3-4B`), which is looked for in the cache and
            then downloaded into it; or `smollm2`, a small published model from the package registry.
        revision: of a repository: a branch, a tag or a commit; `main` unless given.
        offline: download nothing, as `HF_HUB_OFFLINE=1`.
        family: as for `find_family`, which a repository's config is shown to before its weights are downloaded.
        lister: where plug-ins are listed.

    Raises:
        InvalidCheckpoint: no such folder, checkpoint or repository.
        Refused: a repository cannot be downloaded; the message says why.
        BrokenPlugin: the package that brings the checkpoint, or reads the file, failed to load, or names no folder.
    """
    folder = Path(model).expanduser()
    name = None if folder.exists() else HubName.parse(model)
    if name is not None:
        return _folder_of(_find_in_hub(name, revision or MAIN, offline=offline, family=family, lister=lister), lister)
    if model == smollm2.NAME and not folder.exists() and revision is None:
        return _folder_of(_find_smollm2(offline=offline), lister)
    if revision is not None:
        raise InvalidRequest(
            f"--revision {revision} is of a repository (ORG/NAME), and {model!r} is none", field="revision"
        )
    if folder.exists():
        return _folder_of(folder, lister)
    try:
        plugin = find_plugin(CHECKPOINTS, model, lister=lister)
    except UnknownPlugin as error:
        names = ", ".join(sorted({plugin.name for plugin in list_plugins(CHECKPOINTS, lister=lister)})) or "none"
        raise InvalidCheckpoint(
            f"{model!r} is neither a folder nor an installed checkpoint (installed: {names}); "
            "give the path of a Hugging Face model folder, or the name of a repository: ORG/NAME"
        ) from error
    return _folder_from(plugin)


def _folder_of(path: Path, lister: Lister) -> Path:
    """A folder is itself; for a file in a format of one file, the folder that stands for it."""
    if path.is_dir():
        return path
    suffix = path.suffix.removeprefix(".")
    readers = {plugin.name: plugin for plugin in list_plugins(MODEL_FILES, lister=lister)}
    if suffix not in readers:
        known = ", ".join(f"*.{name}" for name in sorted(readers)) or "none are known"
        raise InvalidCheckpoint(f"{path} is a file, and only some kinds of one are a model ({known}); give its folder")
    return _folder_from(readers[suffix], path)


def _folder_from(plugin: Plugin, *arguments: Path) -> Path:
    """The folder that a package's function names; what it refuses, and what the disk does, is told as it is."""
    find = plugin.load()
    try:
        return Path(find(*arguments))
    except (OpenInferError, OSError):
        raise
    except PLUGIN_ERRORS as error:
        raise BrokenPlugin(f"{plugin.described} names no folder: {type(error).__name__}: {error}") from error


def pull(model: str, *, revision: str | None = None, family: str | None = None) -> Path:
    """Brings a repository in the cache up to what the hub has; returns its folder, or the one file that was named.

    Raises:
        InvalidRequest: not the name of a repository, or no revision.
        Refused: it cannot be downloaded, or no installed family serves it; the message says why.
    """
    if model == smollm2.NAME:
        if revision is not None:
            raise Refused(f"{model} has one revision, {smollm2.SMOLLM2.version} of {smollm2.SMOLLM2.name}")
        return smollm2.find() or smollm2.fetch()
    name = HubName.parse(model)
    if name is None:
        raise InvalidRequest(
            f"{model!r} is not the name of a repository: ORG/NAME, or ORG/NAME/FILE.gguf", field="model"
        )
    return _download(name, _checked(revision or MAIN), family=family, lister=installed)


def _find_in_hub(name: HubName, revision: str, *, offline: bool, family: str | None, lister: Lister) -> Path:
    from huggingface_hub import constants  # read when it matters, as it reads the environment

    cache_dir = Path(constants.HF_HUB_CACHE)
    found = CachedRepo.of(cache_dir, name.repo).find(_checked(revision), name.file)
    if found is not None:
        return found
    if offline or constants.is_offline_mode():
        why = "--offline" if offline else "HF_HUB_OFFLINE"
        raise Refused(
            f"{name} at {revision!r} is neither a folder here nor whole in the cache {cache_dir}, and {why} forbids to "
            f"download it: run openinfer pull {name} where there is a network, and bring the cache here"
        )
    return _download(name, revision, family=family, lister=lister)


def _find_smollm2(*, offline: bool) -> Path:
    found = smollm2.find()
    if found is None and offline:
        raise Refused(
            f"{smollm2.NAME} was not downloaded yet, and --offline forbids it: run openinfer pull {smollm2.NAME} where "
            "there is a network"
        )
    return found or smollm2.fetch()


def _download(name: HubName, revision: str, *, family: str | None, lister: Lister) -> Path:
    from huggingface_hub import constants

    from openinfer.hub.download import download  # the hub's client takes 0.6 s to import

    return download(
        name,
        revision=revision,
        cache_dir=Path(constants.HF_HUB_CACHE),
        accept=lambda folder: find_family(folder, family, lister=lister),
    )


def _checked(revision: str) -> str:
    if not is_revision(revision):
        raise InvalidRequest(f"--revision {revision!r} cannot be a branch, a tag or a commit", field="revision")
    return revision


def checkpoint_distributions(model: str, *, lister: Lister = installed) -> set[str]:
    """The distribution that brings a checkpoint which is called by its entry point's name; none for other models.

    Raises as `find_plugin`.
    """
    if Path(model).expanduser().exists() or model == smollm2.NAME or HubName.parse(model) is not None:
        return set()
    name = find_plugin(CHECKPOINTS, model, lister=lister).distribution
    return set() if name is None else {name}


def name_of(model: str) -> str:
    """What clients call a model: a folder's name, a file's without its suffix, the checkpoint's or repository's."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def find_family(model_dir: Path, name: str | None = None, *, lister: Lister = installed) -> tuple[ModelFamily, Plugin]:
    """The family that serves a folder, and the plug-in it came from.

    Args:
        model_dir: a folder with a `config.json`.
        name: the family to ask; None asks every installed one, and exactly one must claim the config.
        lister: where plug-ins are listed.

    Raises:
        UnclaimedModel: not exactly one family claims it, or the one named refuses it.
        PluginError: the family named is absent, ambiguous or broken.
        InvalidCheckpoint: no readable `config.json`.
    """
    config = read_config(model_dir)
    if name is None:
        return claim(config, list_plugins(MODELS, lister=lister))
    named = find_plugin(MODELS, name, lister=lister)
    load_family(named)  # what is wrong with the one family that was asked for is the whole answer
    return claim(config, [named])
