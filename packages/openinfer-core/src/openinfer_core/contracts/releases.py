"""Whether the packages of openinfer that are installed belong together: by their metadata, and by what fails.

Our packages require each other within a minor version. An installer holds that; one package upgraded by hand, a
wheel installed with `--no-deps` or two checkouts on one path do not, and the damage shows far from its cause.
"""

import contextlib
import operator
import re
import sys
from collections.abc import Callable, Generator
from functools import cache
from types import ModuleType
from typing import Any

from openinfer_core.errors import MixedReleases

OUR_PACKAGES = frozenset(
    {
        "openinfer",
        "openinfer-bench",
        "openinfer-core",
        "openinfer-deepseek",
        "openinfer-deepseek-v4",
        "openinfer-dynamo",
        "openinfer-engine",
        "openinfer-kernels",
        "openinfer-kimi-k2",
        "openinfer-kv-cache",
        "openinfer-kv-offload",
        "openinfer-llama",
        "openinfer-nixl",
        "openinfer-ollama",
        "openinfer-qwen3",
        "openinfer-qwen35",
        "openinfer-ray",
        "openinfer-server",
        "openinfer-tiny-model",
    }
)
"""The distributions of this repository; the module of each has its name with `_` for `-`."""

_REMEDY = "install all packages of openinfer from one release"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")
_BOUND = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)\S*\s*")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_WRONG_CALL = re.compile(
    r"(?:(?P<called>\w+)(?:\.\w+)*\(\) )?.*"
    r"(unexpected keyword argument|missing required argument|missing \d+ required|takes .* positional argument|"
    r"extra positional arguments)",
    re.IGNORECASE,
)


@cache
def require_one_release(distribution: str) -> None:
    """Refuses an installed package beside others of ours than those it requires; these are checked, too.

    What only an extra requires is left out: it is checked when it is used. Of another project's package, what it
    requires of ours is checked and not itself: its contract number says what it was written for.

    Raises:
        MixedReleases: one of them is missing or of another release; the message names both.
    """
    from importlib.metadata import PackageNotFoundError, version

    for sibling, bounds in _ours_required_by(distribution):
        try:
            installed = version(sibling)
        except PackageNotFoundError:
            if distribution not in OUR_PACKAGES:
                continue
            raise MixedReleases(
                f"{_named(distribution)} requires {sibling}{bounds}, which is not installed: {_REMEDY}"
            ) from None
        if distribution in OUR_PACKAGES and not _is_within(installed, bounds):
            raise MixedReleases(
                f"{_named(distribution)} requires {sibling}{bounds}, and {sibling} {installed} is installed: {_REMEDY}"
            )
        require_one_release(sibling)


@contextlib.contextmanager
def one_release() -> Generator[None]:
    """What fails inside because one of our packages lacks what another uses becomes a `MixedReleases`."""
    try:
        yield
    except (ImportError, TypeError, AttributeError) as error:
        sentence = misfit_of(error)
        if sentence is None:
            raise
        raise MixedReleases(sentence) from error


def misfit_of(error: BaseException) -> str | None:
    """The sentence for an error that one of our packages made by using what another does not have; None for others.

    That is an import of one of our modules or of a name in it, an attribute of one of our objects, or a call of one of
    our functions with parameters that it does not know, each from a module of another distribution of ours.
    """
    user = _package_that_raised(error)
    providers = [each for each in _packages_asked(error, user) if each != user] if user in OUR_PACKAGES else []
    if not providers:
        return None
    what, named = f"{type(error).__name__}: {error}", " or ".join(map(_named, providers))
    return f"{_named(user)} uses what {named} does not have ({what}): {_REMEDY}"


def _packages_asked(error: BaseException, user: str) -> list[str]:
    """Those of our packages whose module, object or function an error is about."""
    match error:
        case ImportError(name=str() as name):
            asked = [_package_of(name)]
        case AttributeError(obj=ModuleType(__name__=name)):
            asked = [_package_of(name)]
        case AttributeError(obj=owner) if owner is not None:
            asked = [_package_of((owner if isinstance(owner, type) else type(owner)).__module__)]
        case TypeError():
            asked = _packages_called(str(error), user)
        case _:
            asked = []
    return [each for each in asked if each in OUR_PACKAGES]


def _packages_called(message: str, user: str) -> list[str]:
    """Those of the packages that the caller requires whose function was called wrongly; all, if it has no name."""
    wrong = _WRONG_CALL.match(message)
    if wrong is None:
        return []
    siblings = [sibling for sibling, _ in _ours_required_by(user)]
    called = wrong["called"]  # a Struct's constructor does not say its name
    if called is None:
        return siblings
    modules = [*sys.modules.items()]
    owners = {_package_of(name) for name, module in modules if called in getattr(module, "__dict__", ())}
    return [sibling for sibling in siblings if sibling in owners]


def _package_that_raised(error: BaseException) -> str:
    """The distribution of the innermost Python module that an error passed through, the import system left out."""
    traceback, found = error.__traceback__, ""
    while traceback is not None:
        names = traceback.tb_frame.f_globals
        module = str(names.get("__package__") or names.get("__name__", ""))
        if module.partition(".")[0] not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            found = module
        traceback = traceback.tb_next
    return _package_of(found)


def _package_of(module: str) -> str:
    return module.partition(".")[0].replace("_", "-")


def _named(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution


def _ours_required_by(distribution: str) -> list[tuple[str, str]]:
    """Each package of ours that the metadata requires, and the bounds as written; not what only extras require."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find_distribution

    try:
        metadata = find_distribution(distribution).read_text("METADATA") or ""
    except PackageNotFoundError:
        return []
    found: list[tuple[str, str]] = []
    for line in metadata.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        requirement = _REQUIREMENT.match(value.strip()) if key == "Requires-Dist" else None
        if requirement is None:
            continue
        name, bounds, marker = requirement.groups()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in OUR_PACKAGES and not marker:
            found.append((name, bounds.strip()))
    return found


def _is_within(version: str, bounds: str) -> bool:
    return all(_satisfies(_numbers(version), bound) for bound in bounds.split(",") if bound.strip())


def _satisfies(version: tuple[int, ...], bound: str) -> bool:
    parsed = _BOUND.fullmatch(bound)
    # Our own packages are written with these signs alone: what has another one is refused.
    return parsed is not None and _SIGNS[parsed.group(1)](version, _numbers(parsed.group(2)))


def _numbers(version: str) -> tuple[int, ...]:
    """`0.2` -> `(0, 2, 0, 0)`, so that versions of different length compare; what follows the numbers is left out."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(each) for each in release.group().split(".")] if release else []
    return tuple((numbers + [0] * 4)[:4])
