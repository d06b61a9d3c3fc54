"""Host names and addresses in settings: which of them other hosts can reach."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether a host is ``localhost`` or a numeric loopback address. Looks up no name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolves_to_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host: all addresses of its name here are loopback addresses.

    ``/etc/hosts`` often gives a machine's own name 127.0.1.1.
    """
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(is_loopback(str(address[0])) for *_, address in found)
