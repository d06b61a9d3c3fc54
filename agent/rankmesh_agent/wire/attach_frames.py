"""Frames between a process and the standalone agent that it is attached to. Pure: this module performs no I/O.

The frames use the agent's unix socket, or its HTTP port. The handshake of ``wire.hello`` precedes the
frames. On each connection the client has one request at a time in progress::

    offset  size  field
    0       1     kind      of the request (Request) or response (Response)
    1       1     flags     see FLAGS
    2       2     zero
    4       4     document  bytes of the document that follows: JSON, or of a call the layout below
    8       8     payload   bytes of arrays, one after the other: behind the document, or at the start of the staging
                            buffer of the connection (STAGED)

    a call  0       8     group    id of the group; of a message, too
            8       8     seconds  how long it may take (float64)
            16      8     tag      of a message (signed); of a collective its root, or -1
            24      8     number   of a message, counted by the client
            32      4     rank     of a message: the other end
            36      1     what     the collective (wire.ops.OpType)
            37      1     op       how elements are reduced (wire.ops.ReduceOp), or 255
            38      2     dtype    element type of the arrays (wire.dtypes)
            40      2     outputs  number of arrays that are filled
            42      2     inputs   number of arrays that are read
            44      8 x   lengths  elements of each array: of those that are filled, then of those that are read
                    rest  subject  further arguments on which the ranks must agree (wire.ops.Call), in UTF-8
                          zero, if details follow
                          details  of the call, for the error of a mismatch

All numbers are in network byte order. The receiver checks both lengths against a limit before it allocates memory.

Where both are on one host, the arrays of a connection's calls are in a staging buffer (remote.staging), whose
descriptor comes along with a request. The agent leaves the arrays that it fills behind those that it reads, and the
response has no payload.

The first frame of a connection states its purpose. ACQUIRE: the client leases the agent for one rank of a job. The
connection is then the lease, and the lease ends with it, for any end of the client. OPEN_STREAM: one of any number of
connections for the calls of a lease, so that the calls of several threads do not wait for each other.

The HELLO has the credential of the job with ACQUIRE, that of its lease with OPEN_STREAM (wire.credentials), and as its
attachment the agent, the job and the lease.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from typing import Any, NamedTuple

from rankmesh_agent.wire import json_text, store_frames
from rankmesh_agent.wire.errors import ProtocolError

_ATTACHMENT = struct.Struct("!64s32s16s")
ATTACHMENT_BYTES = _ATTACHMENT.size
HEADER = struct.Struct("!BBxxIQ")
HEADER_BYTES = HEADER.size
CALL = struct.Struct("!QdqQiBBHHH")
MAX_DOCUMENT = (1 << 20) + store_frames.MAX_BYTES
"""Maximum bytes of a document; commands of the store are the largest."""
MAX_PAYLOAD = 1 << 42
NO_OP = 255

BLOCKING = 0x02
"""A flag: the response waits for the message."""
STAGED = 0x04
"""A flag: the arrays are in the connection's staging buffer, and the response's are to be left there."""
FLAGS = BLOCKING | STAGED


class Request(enum.IntEnum):
    """Requests of a client."""

    ACQUIRE = 1
    """Lease the agent; the connection becomes the lease, and carries the next request."""
    RELEASE = 2
    """End the lease."""
    OPEN_STREAM = 16
    """Use the connection for calls; all requests below use such a connection."""
    ABORT = 3
    """End a group because of an error at the client; without a group, those whose creation is not complete."""
    CANCEL = 4
    """Abandon messages."""
    LOST_RANKS = 6
    """Return the errors of the ranks that have failed since the last such request."""
    RECORD_FAILURE = 7
    """Record an error that ended the process, before the lease ends."""
    CALL = 17
    """Run a collective."""
    SEND = 18
    RECEIVE = 19
    WAIT = 20
    """Wait for a message, or only test it."""
    NEW_GROUP = 21
    DROP_GROUP = 22
    SET_GLOBAL_RANKS = 23
    """Change the ranks by which errors name a group's members."""
    FAILURE = 24
    """Return the first failure of a group, or of all."""
    VERIFY = 25
    """Compare the members' calls of an engine at the client."""
    FAILED_RANKS = 26
    """Return the other ranks that the first failure names."""
    STORE = 28
    """Execute a command of the job's store."""
    SET_TIMEOUT = 30
    """Change the default timeout of a group's calls."""
    NUM_WAITING = 33
    """Return how many processes wait for the world to grow."""
    GROW = 34
    """Join the epoch of a larger world; the response is that to ACQUIRE."""


class Response(enum.IntEnum):
    """Responses of an agent."""

    OK = 128
    ERROR = 129
    """An error: its code or type, message and details."""
    PENDING = 130
    """Not complete yet."""


class Header(NamedTuple):
    """Header of a frame; see the module for its fields."""

    kind: int
    flags: int
    document: int
    payload: int


class Call(NamedTuple):
    """A collective or a message; see the module for its fields."""

    group: int
    seconds: float
    tag: int
    number: int
    rank: int
    what: int
    op: int
    dtype: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    subject: str = ""
    details: str = ""


class Attachment(NamedTuple):
    """Purpose of a connection: an agent, a job and a lease.

    Attributes:
        agent: id of the agent.
        job: digest of the job, see wire.credentials.
        lease: id of the lease, 32 hexadecimal digits; empty for a new one.
    """

    agent: str
    job: bytes
    lease: str = ""

    def encode(self) -> bytes:
        """Return the attachment of the HELLO."""
        return _ATTACHMENT.pack(self.agent.encode(), self.job, bytes.fromhex(self.lease))

    @classmethod
    def decode(cls, data: bytes) -> Attachment:
        """Return the attachment of a HELLO."""
        agent, job, lease = _ATTACHMENT.unpack(data)
        return cls(agent.rstrip(b"\0").decode("utf-8", "replace"), job, lease.hex() if any(lease) else "")


def encode(kind: int, document: bytes = b"", payload: int = 0, flags: int = 0) -> bytes:
    """Return a frame without its payload."""
    return HEADER.pack(kind, flags, len(document), payload) + document


def decode(data: bytes | bytearray) -> Header:
    """Return the header at the start of a frame.

    Raises:
        ProtocolError: a length exceeds its limit.
    """
    header = Header(*HEADER.unpack_from(data))
    if header.document > MAX_DOCUMENT or header.payload > MAX_PAYLOAD:
        raise ProtocolError(
            f"a frame of an attached process announces a document of {header.document} bytes and a payload of "
            f"{header.payload}; at most {MAX_DOCUMENT} and {MAX_PAYLOAD} are allowed"
        )
    return header


def encode_call(call: Call) -> bytes:
    """Return a call as a document."""
    *head, outputs, inputs, subject, details = call
    count = len(outputs) + len(inputs)
    lengths = struct.pack(f"!{count}Q", *outputs, *inputs)
    text = f"{subject}\0{details}" if details else subject
    return CALL.pack(*head, len(outputs), len(inputs)) + lengths + text.encode(errors="replace")


def decode_call(document: bytes | bytearray) -> Call:
    """Return the call that a document describes.

    Raises:
        ProtocolError: the document has another layout.
    """
    try:
        group, seconds, tag, number, rank, what, op, dtype, outputs, inputs = CALL.unpack_from(document)
        count = outputs + inputs
        lengths: tuple[int, ...] = struct.unpack_from(f"!{count}Q", document, CALL.size)
        subject, _, details = bytes(document[CALL.size + 8 * count :]).decode().partition("\0")
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"an attached process described a call of {len(document)} bytes") from error
    if math.isnan(seconds):
        raise ProtocolError("an attached process described a call that may take NaN seconds")
    arrays = lengths[:outputs], lengths[outputs:]
    return Call(group, seconds, tag, number, rank, what, op, dtype, *arrays, subject, details)


def encode_json(document: Any) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document).encode()


def decode_json(document: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a document.

    Raises:
        ProtocolError: the document is not a JSON object.
    """
    try:
        found = json_text.loads_with_infinity(document)
    except ValueError as error:
        raise ProtocolError("an attached process, or its agent, sent a document that is no JSON") from error
    if not isinstance(found, dict):
        raise ProtocolError("an attached process, or its agent, sent a document that is no JSON object")
    return found
