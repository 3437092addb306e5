"""The exception tree of the contract.

Whose fault it is says its type: the client's (`InvalidRequest`, `Refused`: 4xx), no one's and of the moment
(`Unavailable`: 503, worth trying again), ours (all else: 5xx). Only the first is ever remembered against a request.

OpenInferError
├── InvalidRequest        a caller's value is out of range; names the field (also a ValueError)
├── Refused               something valid that this composition cannot do
│   ├── UnclaimedModel    no installed family, or more than one, claims a config
│   └── InvalidCheckpoint a model folder is incomplete or contradicts its config
├── Unavailable           what serving a request needs is not to be had at the moment
├── PluginError           discovery of entry points
│   ├── UnknownPlugin     no installed package offers the name
│   ├── AmbiguousPlugin   two packages offer the same name
│   ├── BrokenPlugin      the plug-in's own import failed (its traceback is the cause)
│   └── ContractMismatch  the plug-in was written for another contract than the one installed
├── MixedReleases         packages of openinfer that are installed do not belong together
├── EngineClosed          the engine has ended or its process died
└── ContractViolation     a part broke the contract: a bug of that part, never of the user
    └── PluginFault       a plug-in did so in a way that ends the engine; the message names it, for clients too
"""


def brought_by(flag: str = "") -> str:
    """Says how a missing package gets into the environment: ours are on no index, where strangers may use the names."""
    option = f" {flag}" if flag else ""
    return (
        f"`./run install{option}` in a checkout of openinfer brings it, or `install.py{option}` in a folder of wheels"
    )


class OpenInferError(Exception):
    """Root of everything openinfer raises on purpose."""


class InvalidRequest(OpenInferError, ValueError):
    """A request, or one of its parameters, is out of range.

    As a `ValueError` it reaches the caller that decodes a Struct as the cause of a `msgspec.ValidationError`, which
    names the place in the document.

    Attributes:
        field: the field's name, or None when several are at odds.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Refused(OpenInferError):
    """What was asked is understood and not possible here; the message says what is."""


class UnclaimedModel(Refused):
    """Not exactly one installed family claims a model's `config.json`."""


class InvalidCheckpoint(Refused):
    """A model folder lacks files or tensors, or they contradict its `config.json`."""


class Unavailable(OpenInferError):
    """A fault that passes: a process was killed or stalled, memory or descriptors were short; another try may work."""


class PluginError(OpenInferError):
    """Discovery of a plug-in failed."""


class UnknownPlugin(PluginError):
    """No installed distribution offers the name asked for."""


class AmbiguousPlugin(PluginError):
    """Two installed distributions offer the same name."""


class BrokenPlugin(PluginError):
    """The plug-in was found and failed to load; its own exception is the `__cause__`."""


class ContractMismatch(PluginError):
    """A plug-in says another number of its group's contract than this release has (`openinfer_core.contracts`)."""


class MixedReleases(OpenInferError):
    """Two of our own packages are of releases that do not belong together."""


class EngineClosed(OpenInferError):
    """The engine was closed, or its process died."""


class ContractViolation(OpenInferError):
    """A scheduler, runner or plug-in did what the contract forbids."""


class PluginFault(ContractViolation):
    """A plug-in broke its contract, and the engine cannot go on.

    The message names the plug-in and its distribution, quotes no exception and may be shown to a client: every open
    request ends with it. What the plug-in raised is the `__cause__`.
    """
