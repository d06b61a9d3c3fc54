"""``rankmesh tls``: makes an authority and the certificates of hosts."""

from __future__ import annotations

import datetime
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from rankmesh._cli.exit_codes import USAGE, CommandError, command, write

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    _Pair: TypeAlias = tuple[x509.Certificate, EllipticCurvePrivateKey]

app = typer.Typer(name="tls", help="Make TLS certificates for hosts.", no_args_is_help=True)
_ALSO = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate has, for the processes of its host."""
_CLOCK_SKEW = datetime.timedelta(minutes=10)
_AUTHORITY = "ca"
_HOST = re.compile(r"[A-Za-z0-9_.:*-]+")


@app.callback()
def tls() -> None:
    """Make TLS certificates for hosts."""


@app.command()
@command
def make(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for the files; created if it does not exist.")
    ],
    host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[,NAME...]", help="A host: all names and addresses that others use for it; once for each host."
        ),
    ],
    days: Annotated[int, typer.Option(metavar="DAYS", min=1, max=36500, help="Validity of the certificates.")] = 365,
) -> None:
    """Make the certificates of hosts.

    DIR gets a certificate and a key for each host, and those of the authority that signs them. An authority that is
    there already is used again: to add a host, or renew a certificate.
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
    """Make the files of ``rankmesh tls make``, for the names and addresses of each host; the first names the files."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _load_authority(directory) or _issue(directory, _AUTHORITY, datetime.timedelta(days=3650))
    for names in hosts:
        _issue(directory, names[0], validity, authority, list(dict.fromkeys([*names, *_ALSO])))


def _load_authority(directory: Path) -> _Pair | None:
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


def _issue(
    directory: Path,
    subject: str,
    validity: datetime.timedelta,
    authority: _Pair | None = None,
    names: Sequence[str] = (),
) -> _Pair:
    """Write and return a certificate and its key: of a host if it has names, else of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    from rankmesh_agent.net.authority import SIGNS, alternative, name_of

    key = ec.generate_private_key(ec.SECP256R1())
    name = name_of(subject[:64] if names else "RankMesh authority")
    issuer, signing_key = (authority[0].subject, authority[1]) if authority else (name, key)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer, name, key.public_key(), x509.random_serial_number(), now - _CLOCK_SKEW, now + validity
    )
    extensions: list[x509.ExtensionType] = [
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
    ]
    if names:
        extensions += [x509.SubjectAlternativeName(list(map(alternative, names))), x509.ExtendedKeyUsage(both)]
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    else:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(SIGNS, critical=True)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(signing_key, SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(directory / f"{subject}-key.pem", secret, mode=0o600)
    _write(directory / f"{subject}.pem", certificate.public_bytes(Encoding.PEM), mode=0o644)
    return certificate, key


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file at once, which has its mode from the beginning."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
