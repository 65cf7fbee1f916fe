"""Certificates, tried before the model is loaded: uvicorn would complain minutes later."""

import ssl

from kunserve.core.config import ServerConfig
from kunserve.core.errors import ConfigError


def check_certificates(server: ServerConfig) -> None:
    """Raise ConfigError for files that cannot be used together."""
    if server.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"--ssl-certfile {server.ssl_certfile}"
    if server.ssl_keyfile is not None:
        files += f", --ssl-keyfile {server.ssl_keyfile}"
    try:
        # An empty password, because OpenSSL would ask the terminal for one.
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password="")
    except OSError as error:
        raise ConfigError(f"{files}: {_reason(error)}") from None
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {server.ssl_ca_certs}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """``ssl.SSLError`` is an OSError whose text is OpenSSL's."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    known = {
        "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
        "BAD_DECRYPT": "the key has a password; give one without",
        "BAD_PASSWORD_READ": "the key has a password; give one without",
        "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate in PEM",
        "NO_START_LINE": "it is no PEM",
    }
    return known.get(error.reason or "", error.reason or "it holds no certificate and key in PEM")
