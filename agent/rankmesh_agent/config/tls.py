"""TLS settings of a process: the certificate, the authority, and whether connections without TLS are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh_agent.config.env import integer


@dataclass(frozen=True)
class TlsSettings:
    """TLS settings. All connections of a process share them, as they are the host's and not a job's.

    Attributes:
        cert: RANKMESH_TLS_CERT, the certificate of this host in a PEM file, for servers and clients alike.
        key: RANKMESH_TLS_KEY, its private key in a PEM file.
        ca: RANKMESH_TLS_CA, the authorities in a PEM file that sign the certificates of all hosts; those of the system
            if empty. With it, servers require a certificate of their clients.
        required: RANKMESH_TLS=require, whether to refuse connections without TLS, loopback included.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    required: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TlsSettings:
        """Read the settings; raise ValueError if a variable is invalid, or lacks another one."""
        cert, key = environ.get("RANKMESH_TLS_CERT", ""), environ.get("RANKMESH_TLS_KEY", "")
        mode = environ.get("RANKMESH_TLS", "").lower()
        if mode not in ("", "require"):
            raise ValueError(f"RANKMESH_TLS={mode!r}: set it to 'require', or leave it out")
        if bool(cert) != bool(key):
            given, missing = ("CERT", "KEY") if cert else ("KEY", "CERT")
            raise ValueError(f"RANKMESH_TLS_{given} is set, but RANKMESH_TLS_{missing} is not: set both, or neither")
        return cls(cert, key, environ.get("RANKMESH_TLS_CA", ""), mode == "require")

    @property
    def enabled(self) -> bool:
        """True if this process uses TLS."""
        return self.required or bool(self.cert or self.ca)


def tls_settings() -> TlsSettings:
    """Return the settings of this process; see from_env."""
    return TlsSettings.from_env(os.environ)


def private_network(environ: Mapping[str, str] | None = None) -> bool:
    """Return RANKMESH_PRIVATE_NETWORK: whether connections between hosts need no TLS."""
    return bool(integer(os.environ if environ is None else environ, "RANKMESH_PRIVATE_NETWORK", at_most=1))


def server_scheme() -> str:
    """Return https if this process has a certificate in files; clients with the token find out about its TLS: http."""
    return "https" if tls_settings().cert else "http"


def client_scheme() -> str:
    """Return the scheme of URLs that are given without one, as host and port."""
    return "https" if tls_settings().enabled else "http"
