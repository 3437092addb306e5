"""The server's certificate."""

import ssl

from openinfer_server.errors import UnusableCertificate
from openinfer_server.options import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """What connections are encrypted with, TLS 1.2 or newer; None without a certificate.

    Raises:
        UnusableCertificate: the files cannot be read, or do not belong together.
    """
    if not options.tls_cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert_file, options.tls_key_file or None, password=_no_password)
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (options.tls_cert_file, options.tls_key_file)))
        raise UnusableCertificate(f"the certificate in {files} cannot be used: {error}") from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; a server that starts by itself needs one that is not")
