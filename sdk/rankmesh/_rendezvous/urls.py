"""Parsing of the URLs of init methods."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import cast, get_args
from urllib.parse import SplitResult, parse_qs, unquote

from rankmesh_agent.config.settings import Hosting


def host_and_port(url: SplitResult, text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ValueError: one is missing or invalid; the message quotes ``text``.
    """
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not host or port is None:
        raise ValueError(f"{text!r} needs a host and a port, for example {url.scheme}://127.0.0.1:29500")
    return host, port


def path_of(url: SplitResult, text: str) -> Path:
    """Return the path of a file.

    Raises:
        ValueError: the path is not absolute; the message quotes ``text``.
    """
    path = unquote(url.path)
    if url.netloc or not path.startswith("/"):
        raise ValueError(f"{text!r} needs an absolute path, for example file:///tmp/rendezvous")
    return Path(path)


def number_parameter(url: SplitResult, name: str) -> int | None:
    """Return the number of the query parameter ``name``, None if it is absent.

    Raises:
        ValueError: the value is not an integer.
    """
    values = parse_qs(url.query).get(name)
    if values is None:
        return None
    try:
        return int(values[-1])
    except ValueError:
        raise ValueError(f"{name}={values[-1]!r} in the init_method is not a whole number") from None


def hosting_parameter(url: SplitResult) -> Hosting | None:
    """Return the query parameter ``hosting``, None if it is absent.

    Raises:
        ValueError: the value is unknown.
    """
    values = parse_qs(url.query).get("hosting")
    if values is None:
        return None
    if values[-1] not in get_args(Hosting):
        raise ValueError(f"hosting={values[-1]!r} in the init_method must be 'attached' or 'embedded'")
    return cast(Hosting, values[-1])


def is_multicast(host: str) -> bool:
    """Return whether a host is a multicast address."""
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False
