"""Authorities that every holder of a credential derives from it, and certificates of them: TLS without files.

The key of an authority is HKDF of the credential, so its certificate has the same bytes in every process; Ed25519 signs
deterministically. A process signs a certificate for a key of its own with it. Both ends of a connection accept only the
authority of the credential that the client names (``wire.credentials.server_name``): each thereby proves that it knows
the credential, and TLS gives new keys to every connection.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Iterable, Iterator

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from rankmesh_agent.net.fork import after_fork
from rankmesh_agent.wire.credentials import hkdf, tls_secret

_BEGIN, _END = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)
"""Validity of all certificates: hosts' clocks may be wrong, and a token has no end."""
SIGNS = x509.KeyUsage(*(use == 5 for use in range(9)))  # key_cert_sign, of its parameters


@functools.lru_cache(64)
def _authority(credential: str) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    secret = tls_secret(credential)
    key = Ed25519PrivateKey.from_private_bytes(hkdf(secret, "rankmesh authority"))
    name = name_of(f"RankMesh {hkdf(secret, 'rankmesh name').hex()[:32]}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, _BEGIN, _END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(SIGNS, critical=True)
    )
    return key, builder.sign(key, None)


def authority_pem(credential: str) -> str:
    """Return the certificate of a credential's authority in PEM."""
    return _authority(credential)[1].public_bytes(Encoding.PEM).decode()


def load(context: ssl.SSLContext, credential: str, names: Iterable[str] = ()) -> None:
    """Load into a context a certificate of a credential's authority for this process's key, and that authority alone.

    ``names`` are the host names and addresses of the certificate, for clients that check them.
    """
    authority, issued_by = _authority(credential)
    key = _own_key()
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = x509.CertificateBuilder(
        issued_by.subject, name_of("RankMesh process"), key.public_key(), x509.random_serial_number(), _BEGIN, _END
    ).add_extension(issuer, critical=False)
    if alternatives := [alternative(name) for name in names]:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with _file_with(secret + builder.sign(authority, None).public_bytes(Encoding.PEM)) as path:
        context.load_cert_chain(path)
    context.load_verify_locations(cadata=authority_pem(credential))


@functools.lru_cache(1)
def _own_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


after_fork(_own_key.cache_clear)


def name_of(text: str) -> x509.Name:
    """Return the name of a certificate's subject."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def alternative(name: str) -> x509.GeneralName:
    """Return a host name or an address for a certificate."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


@contextlib.contextmanager
def _file_with(content: bytes) -> Iterator[str]:
    """Yield the path of a file that only this process, or only this user, can read: Python loads keys from files."""
    memory = getattr(os, "memfd_create", None)  # of Linux
    descriptor, path = tempfile.mkstemp() if memory is None else (memory("rankmesh"), "")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield path or f"/proc/self/fd/{descriptor}"
    finally:
        if path:
            os.unlink(path)
