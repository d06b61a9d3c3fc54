"""Frames between a process and the standalone agent that it is attached to. Pure: this module performs no I/O.

The frames use the agent's unix socket, or its HTTP port. The handshake of ``wire.hello`` precedes the
frames. On each connection the client has one request at a time in progress::

    offset  size  field
    0       1     kind      see Kind
    1       1     flags     STAGED
    2       2     zero
    4       4     document  bytes of the document that follows: a request or a result (remote.requests)
    8       8     payload   bytes of arrays, one after the other: behind the document, or at the start of the staging
                            buffer of the connection (STAGED)

All numbers are in network byte order. The receiver checks both lengths against a limit before it allocates memory.

Where both are on one host, the arrays of a connection's calls are in a staging buffer (remote.staging), whose
descriptor comes along with a request. The agent leaves the arrays that it fills behind those that it reads, and the
response has the flag, and no payload.

The attachment of the HELLO is the agent, the job and the lease; the credential is that of the job. Without a lease, the
first request on the connection leases the agent for one rank of the job. The connection is then the lease, and the
lease ends with it, for any end of the client. With the id of a lease, it is one of any number of connections for its
calls: those of several threads do not wait for each other.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import ProtocolError

_ATTACHMENT = struct.Struct("!64s32s16s")
ATTACHMENT_BYTES = _ATTACHMENT.size
HEADER = struct.Struct("!BBxxIQ")
HEADER_BYTES = HEADER.size
MAX_DOCUMENT = (1 << 20) + store_frames.MAX_BYTES
"""Maximum bytes of a document; commands of the store are the largest."""
MAX_PAYLOAD = 1 << 42
STAGED = 0x04
"""The flag: the arrays are in the connection's staging buffer; with a request, the response's are to be left there."""


class Kind(enum.IntEnum):
    """Kind of a frame."""

    REQUEST = 1
    OK = 128
    ERROR = 129


class Header(NamedTuple):
    """Header of a frame; see the module for its fields."""

    kind: int
    flags: int
    document: int
    payload: int


class Attachment(NamedTuple):
    """Purpose of a connection: ids of an agent and a lease, empty for a new one, and the digest of a job."""

    agent: str
    job: bytes
    lease: str = ""

    def encode(self) -> bytes:
        return _ATTACHMENT.pack(self.agent.encode(), self.job, bytes.fromhex(self.lease))

    @classmethod
    def decode(cls, data: bytes) -> Attachment:
        agent, job, lease = _ATTACHMENT.unpack(data)
        return cls(agent.rstrip(b"\0").decode("utf-8", "replace"), job, lease.hex() if any(lease) else "")


def encode(kind: int, document: bytes = b"", payload: int = 0, flags: int = 0) -> bytes:
    """Return a frame without its payload."""
    return HEADER.pack(kind, flags, len(document), payload) + document


def decode(data: bytes | bytearray) -> Header:
    """Return the header at the start of a frame."""
    header = Header(*HEADER.unpack_from(data))
    if header.document > MAX_DOCUMENT or header.payload > MAX_PAYLOAD:
        raise ProtocolError(
            f"a frame of an attached process announces a document of {header.document} bytes and a payload of "
            f"{header.payload}; at most {MAX_DOCUMENT} and {MAX_PAYLOAD} are allowed"
        )
    return header
