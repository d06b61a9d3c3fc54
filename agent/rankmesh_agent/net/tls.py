"""TLS 1.3 for all connections of a process between hosts: of HTTP, of services, and between ranks.

The certificates come from files, or from the token (``net.authority``). Of files, one certificate serves servers and
clients. A client decides whether a connection needs TLS (``secured``); a server finds out by its first byte, and
refuses what it should not get without.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from pathlib import Path
from typing import Any

from rankmesh_agent.config.tls import TlsSettings, private_network, tls_settings
from rankmesh_agent.net.fork import after_fork, import_lock
from rankmesh_agent.net.peer_credentials import is_trusted_listener
from rankmesh_agent.net.sockets import AF_UNIX, is_beyond_host
from rankmesh_agent.net.tls_socket import NO_SIGNAL, TlsContext, TlsObject, TlsSocket
from rankmesh_agent.wire.credentials import NAMES, Credentials, server_name

RECORD = b"\x16"
"""First byte of a connection with TLS: the type of the record of its first message."""
_HELLO_BYTES = 1 << 14
_NO_TOKEN_ALERT = b"\x15\x03\x03\x00\x02\x02\x28"
"""The fatal alert handshake_failure: the response of a server without TLS to a client with it."""
_HTTP_REFUSAL = b"This port serves HTTPS; the request came without TLS. Set RANKMESH_TLS_CA, or use https://.\n"
_HTTP_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_HTTP_REFUSAL), _HTTP_REFUSAL)
)
_REMEDY = "set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY"
_forwarded: set[tuple[str, int]] = set()
"""Addresses of this host at which a process forwards connections to another one."""
DEFAULT_PORTS = {"http": 80, "https": 443}


def server_context(
    settings: TlsSettings, token: str | Credentials = "", names: tuple[str, ...] = (), *, mutual: bool = False
) -> ssl.SSLContext | None:
    """Return the context of a server; None if it has neither a certificate in files nor a token.

    Args:
        names: host names and addresses of the server, for clients that check them.
        mutual: whether clients must show a certificate of the token's authority. Those of HTTP need none.

    Raises:
        ValueError: a file is missing or invalid, or RANKMESH_TLS=require lacks the certificate; the message names its
            variable.
    """
    if settings.cert:
        return _file_context(settings, server=True)
    if settings.required:
        raise ValueError("RANKMESH_TLS=require: a server needs RANKMESH_TLS_CERT and RANKMESH_TLS_KEY, too")
    credentials = Credentials.of(token)
    return _choosing_context(credentials, names, mutual) if credentials else None


def check_environment(*, server: bool) -> None:
    """Raise ValueError unless the settings of this process and their files are valid; see ``server_context``."""
    settings = tls_settings()
    if settings.enabled:
        _file_context(settings, server=False)
    if server:
        server_context(settings)


def client_side(
    sock: socket.socket, host: str, port: int, credential: str = "", settings: TlsSettings | None = None
) -> TlsSocket:
    """Return the client's end of TLS on a socket, whose handshake has not begun; settings are this process's if None.

    Both ends prove the credential; if it is empty, their certificates are in files, and names are checked.
    """
    context = _token_context(credential) if credential else _file_context(settings or tls_settings(), server=False)
    name = server_name(credential) if credential else host
    return TlsSocket(sock, context, f"{host}:{port}", name)


def server_side(sock: socket.socket, peer: str, token: str | Credentials, settings: TlsSettings) -> TlsSocket:
    """Return the server's end of TLS on a socket, whose handshake has not begun; clients must show a certificate."""
    context = server_context(settings, token, mutual=True)
    if context is None:
        raise refuse_tls(sock)
    return TlsSocket(sock, context, peer)


def refuse_tls(sock: socket.socket) -> ConnectionAbortedError:
    """Tell a client that uses TLS that this process has neither certificates nor a token; return the error to raise."""
    _respond(sock, _NO_TOKEN_ALERT)
    return ConnectionAbortedError("the client uses TLS, and this process has neither certificates nor a token")


def refuse_plain(sock: socket.socket) -> ConnectionAbortedError:
    """Tell a client of HTTP that it must use TLS, with certificates in files; return the error to raise."""
    _respond(sock, _HTTP_RESPONSE)
    return ConnectionAbortedError(f"the client does not use TLS, as this process does: {_REMEDY} there")


def _respond(sock: socket.socket, response: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.recv(_HELLO_BYTES, socket.MSG_DONTWAIT)  # with unread bytes, the close would be a reset
    with contextlib.suppress(OSError):
        sock.send(response, NO_SIGNAL)


def secured(
    sock: socket.socket, host: str, address: tuple[Any, ...], token: str, settings: TlsSettings | None = None
) -> socket.socket:
    """Return the client's end of a connection: with TLS, whose handshake has not begun, if it needs that.

    It needs it beyond this host, unless the network is private, or there are neither certificates in files nor a
    token. Within this host it needs it towards other users, to whom this process would otherwise show the token.

    Args:
        sock: the connection, or an attempt to connect to ``address``, a socket address of the host.
    """
    settings, numeric, port = settings or tls_settings(), str(address[0]), int(address[1])
    beyond = is_beyond_host(sock, numeric)
    if settings.required or (settings.cert and beyond):
        return client_side(sock, host, port, settings=settings)
    if not token:
        return sock
    if (numeric, port) not in _forwarded and (private_network() if beyond else is_trusted_listener(numeric, port)):
        return sock
    return client_side(sock, host, port, token)


def require_at(address: tuple[Any, ...]) -> None:
    """Have further connections to a socket address use TLS: the process there passes them on to another host."""
    _forwarded.add((str(address[0]), int(address[1])))


def is_exposed(sock: socket.socket, token: str | Credentials, settings: TlsSettings | None = None) -> bool:
    """Return whether a connection that a server got without TLS should have it."""
    settings = settings or tls_settings()
    if sock.family == AF_UNIX or isinstance(sock, TlsSocket):
        return False
    beyond = is_beyond_host(sock, str(sock.getpeername()[0]))
    if settings.required or (settings.cert and beyond):
        return True
    return bool(token) and beyond and not private_network()


def check_scheme(scheme: str, url: str) -> None:
    """Raise ValueError if the scheme of a URL is neither http nor https, or http where RANKMESH_TLS=require."""
    if scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
    if scheme == "http" and tls_settings().required:
        raise ValueError(f"RANKMESH_TLS=require refuses {url}, which is without TLS: use https://")


def _new_context(*, server: bool) -> TlsContext:
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = TlsObject
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.num_tickets = 0  # a connection is readable only when the peer has sent data
    return context


@functools.lru_cache(64)
def _token_context(
    credential: str, names: tuple[str, ...] = (), *, server: bool = False, mutual: bool = False
) -> TlsContext:
    """Return a context with a certificate of a credential's authority."""
    with import_lock:
        from rankmesh_agent.net import authority  # its library takes 60 ms to load, which few ranks need

    context = _new_context(server=server)
    if server:
        context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
    else:
        context.check_hostname = False  # the name is that of the credential
    context.credential = credential
    authority.load(context, credential, names)
    return context


@functools.lru_cache(8)
def _choosing_context(credentials: Credentials, names: tuple[str, ...], mutual: bool) -> TlsContext:
    """Return a server's context that shows each client a certificate of the authority that it names."""
    # A client that names none, such as curl, gets one of the token's; without a certificate it sends its credential.

    def choose(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        if name is None or not name.endswith(NAMES):
            return None
        credential = credentials.named(name)
        if not credential:
            return int(ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)
        tls.context = _token_context(credential, names, server=True, mutual=mutual)
        return None

    context: TlsContext = _token_context.__wrapped__(credentials.run, names, server=True, mutual=mutual)
    context.sni_callback = choose
    return context


after_fork(_token_context.cache_clear)
after_fork(_choosing_context.cache_clear)


@functools.lru_cache(8)
def _file_context(settings: TlsSettings, *, server: bool) -> TlsContext:
    """Return the context of servers or clients with certificates in files."""
    context = _new_context(server=server)
    if settings.cert:
        _load_certificate(context, settings)
    if settings.ca:
        try:
            context.load_verify_locations(settings.ca)
        except FileNotFoundError:
            raise ValueError(f"RANKMESH_TLS_CA: there is no file {settings.ca}") from None
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"RANKMESH_TLS_CA: {settings.ca} has no certificate in PEM: {error.strerror}") from error
        if server:
            context.verify_mode = ssl.CERT_REQUIRED
    elif not server:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    for name, path in (("KEY", settings.key), ("CERT", settings.cert)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"RANKMESH_TLS_{name}: cannot read {path}: {error.strerror}") from error
    try:
        context.load_cert_chain(settings.cert, settings.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key in RANKMESH_TLS_KEY ({settings.key}) does not belong to {settings.cert}"
        else:
            why = f"{settings.cert} or RANKMESH_TLS_KEY ({settings.key}) is not PEM: {error.strerror}"
        raise ValueError(f"RANKMESH_TLS_CERT: {why}") from error


def _no_password() -> str:
    raise ValueError("RANKMESH_TLS_KEY is encrypted with a password: give a key without one, with mode 0600")
