"""The first bytes of every fast-path connection, before any frame: PREFACE, HELLO and WELCOME. Pure: no I/O.

::

    client → server   PREFACE   magic, version, service, two line breaks                                     13 bytes
                      between hosts, the handshake of TLS; what follows is inside it
    client → server   HELLO     length of the credential, name of the connection                             66 bytes
                                the credential, then the attachment, whose size the service determines
    server → client   WELCOME   magic, version, verdict                                                       9 bytes

By the preface, a port of HTTP serves fast-path connections, too; another server of HTTP takes it for a bad request, and
says so at once. A client sends its credential as an HTTP client does:
over TLS, whose handshake has proved that the server knows it; within its host, to a process of its own user; or over a
network that is declared private. A server reads no more than a limit of a client that it has not accepted.

The attachment names the server that the client means, where it has a name that both ends know: an agent's id where a
process attaches; the instances of both ranks in the mesh. Never an address, which port forwarding changes.
"""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from rankmesh_agent.wire.credentials import Credentials, Grant, Role
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, ProtocolError
from rankmesh_agent.wire.version import PROTOCOL_VERSION

MAGIC = b"RKMH-HI"
NAME_BYTES = 64
MAX_CREDENTIAL_BYTES = 4096
_PREFACE = struct.Struct("!7sBB4s")
_END = b"\r\n\r\n"
PREFACE_BYTES = _PREFACE.size
_WELCOME = struct.Struct("!7sBB")
WELCOME_BYTES = _WELCOME.size
MOST_BYTES = 1 << 13
"""Bytes that a client may have sent when its PREFACE is refused: with unread ones, the close would be a reset."""
_HELLO = struct.Struct(f"!H{NAME_BYTES}s")
HELLO_BYTES = _HELLO.size
"""Size of a HELLO without credential and attachment. The length is first: no first byte of a HELLO is that of TLS."""

_OTHER_USER = (
    "the other side is another user's, and has no token: set RANKMESH_TOKEN to the same secret there and here (for "
    "example the output of 'openssl rand -hex 32')"
)
_NEEDS_TLS = (
    "the other side requires TLS: set RANKMESH_TLS_CERT, RANKMESH_TLS_KEY and RANKMESH_TLS_CA here, too, if they are "
    "set there, and RANKMESH_PRIVATE_NETWORK only if it is"
)

T = TypeVar("T")

Script = Generator[tuple[bytes, int], bytes, T]
"""One side of a handshake: yields the bytes to send and the number of bytes to receive, gets the received bytes, and
returns its result. An error of the connection is thrown into it. ``net.handshake`` runs it."""


class Service(enum.Enum):
    """The service that a client wants, and the role that it needs."""

    MESH = 1, Role.RUN
    STORE = 2, Role.USE
    ATTACH = 3, Role.RUN
    SNAPSHOT = 4, Role.RUN
    PROCESS = 5, Role.RUN
    RECORDS = 6, Role.RUN
    WAITS = 7, Role.RUN

    def __init__(self, number: int, role: Role) -> None:
        self.number = number
        self.role = role


class Verdict(enum.IntEnum):
    """A server's answer to a client."""

    WELCOME = 0
    OTHER_TOKEN = 1
    """It does not accept the credential."""
    NEEDS_TLS = 2
    """The connection comes from another host, without TLS."""
    OTHER_USER = 3
    """The client is a process of another user, and the server has no token."""
    OTHER_SERVICE = 4
    """It does not have the service."""


class NeedsTlsError(ConnectionResetError):
    """At the client: the server accepts it over TLS alone. The next attempt uses TLS."""


class ClientRefusedError(AuthenticationError):
    """At the server: the client has another token."""


class Client(NamedTuple):
    """A client that a server accepts: its connection's random name, its attachment, and what its credential permits."""

    name: bytes
    attachment: bytes
    grant: Grant


def new_name() -> bytes:
    """Return a new name of a connection, which no other process can guess."""
    return secrets.token_bytes(NAME_BYTES)


def preface(service: Service) -> bytes:
    """Return a client's PREFACE."""
    return _PREFACE.pack(MAGIC, PROTOCOL_VERSION, service.number, _END)


def is_preface(start: bytes) -> bool | None:
    """Return whether a connection begins with a PREFACE; None if more bytes are needed."""
    if not start.startswith(MAGIC[: len(start)]):
        return False
    return len(start) >= PREFACE_BYTES or None


def service_of(start: bytes) -> Service | None:
    """Return the service in a PREFACE, whatever its version; None for an unknown one."""
    return next((service for service in Service if service.number == start[WELCOME_BYTES - 1]), None)


def check_preface(start: bytes, service: Service) -> None:
    """Raise ProtocolError unless a client's PREFACE is of this protocol, this version of it, and a service."""
    magic, version, number, _ = _PREFACE.unpack(start)
    _check_version(magic, version)
    if number != service.number:
        raise ProtocolError("the client wants another service than that of this port")


def hello(credential: str, attachment: bytes = b"", name: bytes = b"") -> bytes:
    """Return a client's HELLO."""
    text = credential.encode()
    return _HELLO.pack(len(text), name or new_name()) + text + attachment


def welcome(verdict: Verdict = Verdict.WELCOME) -> bytes:
    """Return a server's WELCOME."""
    return _WELCOME.pack(MAGIC, PROTOCOL_VERSION, verdict)


def client_script(hello_bytes: bytes, refusal: AuthenticationError, reply_bytes: int = 0) -> Script[bytes]:
    """Say HELLO; return what follows the server's WELCOME.

    Raises:
        ProtocolError: the server does not speak this protocol, has another version of it, or not this service; or the
            connection needs TLS, for which there is no token.
        AuthenticationError: ``refusal``: the server has another token; or it is another user's, and without a token.
        NeedsTlsError: the connection needs TLS.
    """
    magic, version, verdict = _WELCOME.unpack((yield hello_bytes, WELCOME_BYTES))
    _check_version(magic, version)
    if verdict == Verdict.OTHER_TOKEN:
        raise refusal
    if verdict == Verdict.NEEDS_TLS:
        without_token = hello_bytes.startswith(bytes(2))  # then the next attempt would have no TLS, either
        raise ProtocolError(_NEEDS_TLS) if without_token else NeedsTlsError(_NEEDS_TLS)
    if verdict == Verdict.OTHER_USER:
        raise AuthenticationError(_OTHER_USER)
    if verdict == Verdict.OTHER_SERVICE:
        raise ProtocolError("the other side does not have this service: is it the right address?")
    return (yield b"", reply_bytes) if reply_bytes else b""


def server_script(
    accepted: Callable[[bytes], str | Credentials],
    service: Service,
    attachment_bytes: int,
    judge: Callable[[], Verdict],
    respond: Callable[[Client], Script[T]],
) -> Script[T]:
    """Receive a HELLO; go on with the client, to which a WELCOME must follow.

    Args:
        accepted: returns the credentials that may have a client with an attachment.
        judge: returns whether the connection may have a client at all.
        respond: returns the script that follows.

    Raises:
        ProtocolError: the credential exceeds the limit.
        ClientRefusedError: it has another token, or no TLS where that is needed.
        DistNetworkError: it is a process of another user.
    """
    size, name = _HELLO.unpack((yield b"", HELLO_BYTES))
    if size > MAX_CREDENTIAL_BYTES:
        raise ProtocolError("the client sends a credential that exceeds the limit")
    body = (yield b"", size + attachment_bytes) if size + attachment_bytes else b""
    verdict = judge()
    if verdict is not Verdict.WELCOME:
        yield welcome(verdict), 0
        if verdict is Verdict.NEEDS_TLS:
            raise ClientRefusedError("the client connects from another host without TLS")
        raise DistNetworkError("the client is a process of another user, or has closed the connection")
    attachment = body[size:]
    credentials = Credentials.of(accepted(attachment))
    grant = credentials.grant_of(body[:size].decode(errors="replace"))
    is_own = grant is not None and grant.job in (None, credentials.job) and not grant.lease
    if grant is None or not is_own or grant.role < service.role:
        yield welcome(Verdict.OTHER_TOKEN), 0
        raise ClientRefusedError("the other side has another token: RANKMESH_TOKEN must be the same on every rank")
    return (yield from respond(Client(name, attachment, grant)))


def welcoming(reply: bytes = b"") -> Callable[[Client], Script[Client]]:
    """Return a server's last step: it says WELCOME, and what follows it; its result is the client."""

    def respond(client: Client) -> Script[Client]:
        yield welcome() + reply, 0
        return client

    return respond


def _check_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the other side of the connection does not speak RankMesh's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks protocol version {version}, this one {PROTOCOL_VERSION}: upgrade the older"
        )
