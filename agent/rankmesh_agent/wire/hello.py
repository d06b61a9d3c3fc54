"""The first bytes of every fast-path connection, before any frame: HELLO and WELCOME. Pure: no I/O.

::

    client → server   HELLO     magic, version, service, name, length of the credential                     75 bytes
                                the credential, then the attachment, whose size the service determines
    server → client   WELCOME   magic, version, verdict                                                      9 bytes

A client sends its credential as an HTTP client does: over TLS, whose handshake has proved that the server knows it;
within its host, to a process of its own user; or over a network that is declared private. A server reads the credential
only up to a limit, and the attachment only if it accepts that.

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
from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.version import PROTOCOL_VERSION

MAGIC = b"RKMH-HI"
NAME_BYTES = 64
MAX_CREDENTIAL_BYTES = 4096
_MAGIC = struct.Struct("!7sB")
_REST = struct.Struct(f"!B{NAME_BYTES}sH")
HELLO_BYTES = _MAGIC.size + _REST.size
_WELCOME = struct.Struct("!7sBB")
WELCOME_BYTES = _WELCOME.size

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

    def __init__(self, number: int, role: Role) -> None:
        self.number = number
        self.role = role


class Verdict(enum.IntEnum):
    """A server's answer to a HELLO."""

    WELCOME = 0
    OTHER_TOKEN = 1
    """It does not accept the credential."""
    NEEDS_TLS = 2
    """The connection comes from another host, without TLS."""


class NeedsTlsError(ConnectionResetError):
    """At the client: the server accepts it over TLS alone. The next attempt uses TLS."""


class ClientRefusedError(AuthenticationError):
    """At the server: the client has another token."""


class Client(NamedTuple):
    """A client that a server accepts.

    Attributes:
        name: its random name of the connection.
        attachment: what follows the credential.
        grant: what the credential permits.
    """

    name: bytes
    attachment: bytes
    grant: Grant


def new_name() -> bytes:
    """Return a new name of a connection, which no other process can guess."""
    return secrets.token_bytes(NAME_BYTES)


def hello(service: Service, credential: str, attachment: bytes = b"", name: bytes = b"") -> bytes:
    """Return a client's HELLO."""
    text = credential.encode()
    rest = _REST.pack(service.number, name or new_name(), len(text))
    return _MAGIC.pack(MAGIC, PROTOCOL_VERSION) + rest + text + attachment


def welcome(verdict: Verdict = Verdict.WELCOME) -> bytes:
    """Return a server's WELCOME."""
    return _WELCOME.pack(MAGIC, PROTOCOL_VERSION, verdict)


def client_script(hello_bytes: bytes, refusal: AuthenticationError, reply_bytes: int = 0) -> Script[bytes]:
    """Say HELLO; return what follows the server's WELCOME.

    Args:
        hello_bytes: see ``hello``.
        refusal: raised if the server has another token.
        reply_bytes: number of bytes that follow the WELCOME.

    Raises:
        ProtocolError: the server does not speak this protocol, or has another version of it.
        NeedsTlsError: the connection needs TLS.
    """
    magic, version, verdict = _WELCOME.unpack((yield hello_bytes, WELCOME_BYTES))
    _check_version(magic, version)
    if verdict == Verdict.OTHER_TOKEN:
        raise refusal
    if verdict == Verdict.NEEDS_TLS:
        raise NeedsTlsError(_NEEDS_TLS)
    return (yield b"", reply_bytes) if reply_bytes else b""


def server_script(
    accepted: Callable[[bytes], str | Credentials], service: Service, attachment_bytes: int, exposed: bool
) -> Script[Client]:
    """Receive a HELLO; return the client, to which a WELCOME must follow.

    Args:
        accepted: returns the credentials that may have a client with an attachment.
        service: the service of the server.
        attachment_bytes: size of its attachment.
        exposed: whether the connection needs TLS, and has none.

    Raises:
        ProtocolError: the client does not speak this protocol, or has another version of it.
        ClientRefusedError: it has another token, or no TLS where that is needed.
    """
    magic, version = _MAGIC.unpack((yield b"", _MAGIC.size))
    if magic == MAGIC and version != PROTOCOL_VERSION:
        yield welcome(), 0  # has the version
    _check_version(magic, version)
    number, name, size = _REST.unpack((yield b"", _REST.size))
    if number != service.number or size > MAX_CREDENTIAL_BYTES:
        raise ProtocolError("the client wants another service than that of this port")
    if exposed:
        yield welcome(Verdict.NEEDS_TLS), 0
        raise ClientRefusedError("the client connects from another host without TLS")
    body = (yield b"", size + attachment_bytes) if size + attachment_bytes else b""
    attachment = body[size:]
    credentials = Credentials.of(accepted(attachment))
    grant = credentials.grant_of(body[:size].decode(errors="replace"))
    is_own = grant is not None and grant.job in (None, credentials.job) and not grant.lease
    if grant is None or not is_own or grant.role < service.role:
        yield welcome(Verdict.OTHER_TOKEN), 0
        raise ClientRefusedError("the other side has another token: RANKMESH_TOKEN must be the same on every rank")
    return Client(name, attachment, grant)


def accepting_script(
    accepted: Callable[[bytes], str | Credentials], service: Service, attachment_bytes: int, exposed: bool
) -> Script[Client]:
    """Receive a HELLO, and say WELCOME; return the client. For the arguments and errors see ``server_script``."""
    client = yield from server_script(accepted, service, attachment_bytes, exposed)
    yield welcome(), 0
    return client


def _check_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the other side of the connection does not speak RankMesh's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks protocol version {version}, this one {PROTOCOL_VERSION}: upgrade the older"
        )
