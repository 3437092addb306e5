"""The exceptions of this package, in addition to those of `openinfer_core.errors` that it raises.

openinfer_core.errors.OpenInferError
└── GroupBroken   ranks that work together cannot go on: one of them failed, left, or asked for something else
"""

from openinfer_core.errors import OpenInferError


class GroupBroken(OpenInferError):
    """A group of ranks cannot complete a collective; the first failure is the `__cause__` where there is one.

    Every rank of the group gets it, in the collective it waits in or in its next one, and the group stays broken.
    """
