"""The server's exception tree.

    OpenInferError
    └── ServerError             the server cannot start
        ├── CannotListen        the address is in use or not ours
        ├── ConflictingRoutes   two endpoints offer one method and path
        ├── UnusableParser      no tool or reasoning parser can be chosen, or the one chosen is none
        ├── UnusableTokenizer   the model folder has no tokenizer this server can use
        └── UnusableTemplate    the model folder's chat template does not compile

What a client is told about its request is `api_errors.ApiError`, which never leaves the server as an exception.
"""

from openinfer_core.errors import OpenInferError


class ServerError(OpenInferError):
    """The server cannot start."""


class CannotListen(ServerError):
    """The address to listen on is in use or not ours."""


class ConflictingRoutes(ServerError):
    """Two endpoints offer the same method and path."""


class UnusableParser(ServerError):
    """No tool or reasoning parser can be chosen, or what was chosen is none."""


class UnusableTokenizer(ServerError):
    """The model folder has no tokenizer, or one that this server cannot use."""


class UnusableTemplate(ServerError):
    """The model folder's chat template does not compile or is ambiguous."""
