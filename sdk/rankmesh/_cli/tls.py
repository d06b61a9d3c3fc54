"""``rankmesh tls``: makes an authority and the certificates of hosts."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh._cli.exit_codes import USAGE, CommandError, command, write

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

app = typer.Typer(name="tls", help="Make certificates for jobs whose connections are encrypted.", no_args_is_help=True)
_ALSO = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate has, for the processes of its host."""
_CLOCK_SKEW = datetime.timedelta(minutes=10)
_AUTHORITY = "ca"
_HOST = re.compile(r"[A-Za-z0-9_.:*-]+")


@app.callback()
def tls() -> None:
    """Make certificates for jobs whose connections are encrypted."""


@app.command()
@command
def make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the files; created if need be.")],
    host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[,NAME...]", help="A host: all names and addresses that others use for it. Once per host."
        ),
    ],
    days: Annotated[
        int, typer.Option(metavar="DAYS", min=1, max=36500, help="Validity of the hosts' certificates, in days.")
    ] = 365,
) -> None:
    """Make a certificate and a key for each host, and the authority that signs them.

    An authority that is in DIR already signs the new certificates, too: to add a host, or renew a certificate.
    """
    hosts = [[name.strip() for name in names.split(",") if name.strip()] for names in host]
    for names in hosts:
        for name in names:
            if not _HOST.fullmatch(name):
                raise CommandError(f"{name!r} is not the name or address of a host", USAGE)
    if not all(hosts):
        raise CommandError("--host needs a name or an address", USAGE)
    if any(names[0] == _AUTHORITY for names in hosts):
        raise CommandError(f"the files of {_AUTHORITY!r} are the authority's: give that host's full name first", USAGE)
    try:
        make_certificates(directory, hosts, datetime.timedelta(days=days))
    except OSError as error:
        raise CommandError(f"cannot write to {directory}: {error.strerror}") from error
    for names in hosts:
        cert, key = (shlex.quote(str(directory / f"{names[0]}{suffix}")) for suffix in (".pem", "-key.pem"))
        write(
            f"# {', '.join(names)}\n"
            f"export RANKMESH_TLS_CERT={cert}\n"
            f"export RANKMESH_TLS_KEY={key}\n"
            f"export RANKMESH_TLS_CA={shlex.quote(str(directory / f'{_AUTHORITY}.pem'))}\n"
        )
    write(f"# Copy these three files to each host, and never {directory / f'{_AUTHORITY}-key.pem'}.\n")


def make_certificates(directory: Path, hosts: list[list[str]], validity: datetime.timedelta) -> None:
    """Make the files of ``rankmesh tls make``.

    Args:
        directory: the directory.
        hosts: the names and addresses of each host; the first one names its files.
        validity: of the hosts' certificates, from now on.

    Raises:
        OSError: a file cannot be written.
        CommandError: the files of an authority are there, but invalid.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, authority_key = _load_authority(directory) or _make_authority(directory)
    for names in hosts:
        key = _new_key()
        unique = list(dict.fromkeys([*names, *_ALSO]))
        certificate = _sign(names[0], key, validity, authority_key, authority, names=unique)
        _write_pair(directory, names[0], certificate, key)


def _load_authority(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey] | None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path, key_path = directory / f"{_AUTHORITY}.pem", directory / f"{_AUTHORITY}-key.pem"
    if not path.exists() and not key_path.exists():
        return None
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_pem_private_key(key_path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{path} and {key_path} are not an authority's certificate and key: {error}") from error
    if not isinstance(key, EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise CommandError(f"{key_path} does not belong to {path}")
    return certificate, key


def _make_authority(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    key = _new_key()
    certificate = _sign("RankMesh authority", key, datetime.timedelta(days=3650), key, None)
    _write_pair(directory, _AUTHORITY, certificate, key)
    return certificate, key


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _sign(
    subject: str,
    key: EllipticCurvePrivateKey,
    validity: datetime.timedelta,
    signing_key: EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
    *,
    names: list[str] | None = None,
) -> x509.Certificate:
    """Return a certificate: of a host if it has names, else of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
    of_host = names is not None
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if authority is None else authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + validity)
        .add_extension(x509.BasicConstraints(ca=not of_host, path_length=None if of_host else 0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=of_host,
                key_cert_sign=not of_host,
                crl_sign=not of_host,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if names is not None:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(signing_key, hashes.SHA256())


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _write_pair(directory: Path, name: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    _write(
        directory / f"{name}-key.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600
    )
    _write(directory / f"{name}.pem", certificate.public_bytes(Encoding.PEM), mode=0o644)


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file at once, which has its mode from the beginning."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
