"""The server's exception tree.

    OpenInferError
    └── ServerError             the server cannot start
        ├── CannotListen        the address is in use or not ours
        ├── ConflictingRoutes   two endpoints offer one method and path
        ├── TooManyConnections  the system allows fewer open files than the connections that were asked for
        ├── UnusableCertificate the certificate cannot be read
        ├── UnusableKeys        the key file cannot be read, or a key in it is malformed
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


class TooManyConnections(ServerError):
    """There are fewer descriptors than `max_connections` needs."""


class UnusableCertificate(ServerError):
    """The certificate or its key cannot be read, or they do not belong together."""


class UnusableKeys(ServerError):
    """The key file cannot be read, has no keys, or one of them is malformed."""


class UnusableParser(ServerError):
    """No tool or reasoning parser can be chosen, or what was chosen is none."""


class UnusableTokenizer(ServerError):
    """The model folder has no tokenizer, or one that this server cannot use."""


class UnusableTemplate(ServerError):
    """The model folder's chat template does not compile or is ambiguous."""
