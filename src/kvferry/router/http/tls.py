"""TLS of the router's listener and of its connections to engines. There is no way to leave out a check of the other."""

from __future__ import annotations

import ssl

from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig


def server_context(config: RouterConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. With `ssl_ca_certs` clients must show a certificate that one of these signed.

    Raises `ConfigError`.
    """
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certfile, keyfile = config.ssl_certfile, config.ssl_keyfile or None

    def no_password() -> str:
        raise ConfigError(f"--ssl-keyfile: {keyfile or certfile} has a password", hint="give a key without one")

    try:
        context.load_cert_chain(certfile, keyfile, password=no_password)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("--ssl-certfile, --ssl-keyfile", f"{certfile}, {keyfile or certfile}", error) from None
    if config.ssl_ca_certs:
        _load(context, config.ssl_ca_certs, "--ssl-ca-certs")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def engine_context(config: RouterConfig) -> ssl.SSLContext | None:
    """For `https` engines: their certificates are checked against `engine_ca_certs`. None: against the system's.

    Raises `ConfigError`.
    """
    if not config.engine_ca_certs:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, config.engine_ca_certs, "--engine-ca-certs")
    return context


def _load(context: ssl.SSLContext, path: str, option: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(option, path, error) from None


def _unusable(option: str, path: str, error: OSError) -> ConfigError:
    said = error.strerror if not isinstance(error, ssl.SSLError) else (error.reason or str(error))
    return ConfigError(f"{option}: {path}: {said}", hint="expected files in PEM format that this process can read")
