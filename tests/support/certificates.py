"""Authorities and hosts' certificates for tests, by the code of ``rankmesh tls make``."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankmesh._cli.tls import make_certificates

YEAR = datetime.timedelta(days=365)
EXPIRED = datetime.timedelta(seconds=-1)


def tls_of(folder: Path, host: str = "here", validity: datetime.timedelta = YEAR, **others: str) -> dict[str, str]:
    """Return the TLS variables of a host (names, with commas) whose certificate the folder's authority has signed."""
    names = host.split(",")
    if not (folder / f"{names[0]}.pem").exists():
        make_certificates(folder, [names], validity)
    files = {"CERT": f"{names[0]}.pem", "KEY": f"{names[0]}-key.pem", "CA": "ca.pem"}
    return {f"RANKMESH_TLS_{name}": str(folder / file) for name, file in files.items()} | others


def required(folder: Path, host: str = "here") -> dict[str, str]:
    """Return the same, for all connections: those of loopback are exempt otherwise."""
    return tls_of(folder, host, RANKMESH_TLS="require")


@contextlib.contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the TLS variables of this process, and no others of them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RANKMESH_TLS")}
    for name in before:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
