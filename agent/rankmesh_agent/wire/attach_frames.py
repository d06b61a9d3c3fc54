"""The frames between a process and the standalone agent that it is attached to. Pure: no input or output happens here.

They go over a unix socket of the agent's, or over its HTTP port, where the client asks for another protocol first. The
challenge of ``wire.handshake`` comes before any frame. On each connection the client asks one thing at a time, and the
agent answers, perhaps after questions of its own::

    offset  size  field
    0       1     kind      what is asked (Ask) or answered (Answer)
    1       1     flags     see FLAGS
    2       2     zero
    4       4     document  bytes of the document that follows: JSON, or of a call the layout below
    8       8     payload   bytes of arrays that follow the document, one after the other

    a call  0       8     group    id of the group; of a message, too
            8       8     seconds  how long it may take (float64)
            16      8     tag      of a message (signed); of a collective its root, or -1
            24      8     number   of a message, which the client counts
            32      4     rank     of a message: the other end
            36      1     what     the collective (wire.ops.OpType)
            37      1     op       how elements are reduced (wire.ops.ReduceOp), or 255
            38      2     dtype    element type of the arrays (wire.dtypes)
            40      2     outputs  how many arrays are filled
            42      2     inputs   how many are read
            44      8 x   lengths  elements of each array: of those that are filled, then of those that are read
                    rest  subject  what else the ranks have to agree on (wire.ops.Call), in UTF-8

All numbers are in network byte order. Both lengths are checked against a limit before anything is allocated.

The first frame of a connection says what it is for. CLAIM: the client takes the agent, for one rank of a job; the
connection is then the lease, which ends with it, however the client ends. LANE: one of any number of connections for
the calls of a lease, so that those of several threads do not wait for each other.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.upgrade import Upgrade

UPGRADE = Upgrade(b"/v1/attach", b"rankmesh-attach/1")
HEADER = struct.Struct("!BBxxIQ")
HEADER_BYTES = HEADER.size
CALL = struct.Struct("!QdqQiBBHHH")
MAX_DOCUMENT = (1 << 20) + store_frames.MAX_BYTES
"""Most bytes of a document: commands to the store are the largest."""
MAX_PAYLOAD = 1 << 42
NO_OP = 255

HAS_NOTE = 0x01
"""A flag: the client can say more of the call if the ranks' calls do not fit together."""
BLOCKING = 0x02
"""A flag: the message is waited for at once."""
FLAGS = HAS_NOTE | BLOCKING


class Request(enum.IntEnum):
    """What a client asks for."""

    ACQUIRE = 1
    """The agent; over the connection that is the lease, as are the next five."""
    RELEASE = 2
    """The end of the lease."""
    ABORT = 3
    """The end of a group, because of an error at the client."""
    CANCEL = 4
    """That a message is waited for no longer."""
    ABORT_PENDING_GROUPS = 5
    """That groups are made no longer which are being made."""
    REPORT = 6
    """Nothing; it tells which calls the client has made itself."""
    OPEN_STREAM = 16
    """To use the connection for calls; all that follow are asked over such a connection."""
    CALL = 17
    """A collective."""
    SEND = 18
    RECEIVE = 19
    WAIT = 20
    """The end of a message, or just a look at it."""
    NEW_GROUP = 21
    DROP_GROUP = 22
    SET_GLOBAL_RANKS = 23
    """That the members of a group are known by other numbers from now on."""
    FAILURE = 24
    """A group's failure."""
    CHECK_PEERS = 25
    """Whether a call that the client makes itself can go on."""
    VERIFY = 26
    """The arrival at such a call over messages."""
    EXCHANGE_DESCRIPTIONS = 27
    """What everyone called."""
    STORE = 28
    """A command to the job's store."""
    NOTE = 29
    """The answer to the agent's question for a note."""
    SET_TIMEOUT = 30
    """That calls of a group may take another time by default from now on."""


class Response(enum.IntEnum):
    """What an agent answers."""

    OK = 128
    ERROR = 129
    """An error: its code or type, message and details."""
    PENDING = 130
    """Not done yet."""
    NEED_NOTE = 131
    """A question: what else is there to say of the call?"""


class Header(NamedTuple):
    """What a frame begins with; see the module."""

    kind: int
    flags: int
    document: int
    payload: int


class Call(NamedTuple):
    """A collective or a message; see the module."""

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


def encode(kind: int, document: bytes = b"", payload: int = 0, flags: int = 0) -> bytes:
    """Return a frame but for its payload."""
    return HEADER.pack(kind, flags, len(document), payload) + document


def decode(data: bytes | bytearray) -> Header:
    """Return the header that a frame begins with.

    Raises:
        ProtocolError: a length over its limit.
    """
    header = Header(*HEADER.unpack_from(data))
    if header.document > MAX_DOCUMENT or header.payload > MAX_PAYLOAD:
        raise ProtocolError(
            f"a frame of an attached process would have a document of {header.document} bytes and a payload of "
            f"{header.payload}; at most {MAX_DOCUMENT} and {MAX_PAYLOAD} are allowed"
        )
    return header


def encode_call(call: Call) -> bytes:
    """Return a call as a document."""
    *head, outputs, inputs, subject = call
    count = len(outputs) + len(inputs)
    lengths = struct.pack(f"!{count}Q", *outputs, *inputs)
    return CALL.pack(*head, len(outputs), len(inputs)) + lengths + subject.encode()


def decode_call(document: bytes | bytearray) -> Call:
    """Return the call that a document describes.

    Raises:
        ProtocolError: it describes none.
    """
    try:
        group, seconds, tag, number, rank, what, op, dtype, outputs, inputs = CALL.unpack_from(document)
        count = outputs + inputs
        lengths: tuple[int, ...] = struct.unpack_from(f"!{count}Q", document, CALL.size)
        subject = bytes(document[CALL.size + 8 * count :]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"an attached process described a call of {len(document)} bytes") from error
    return Call(group, seconds, tag, number, rank, what, op, dtype, lengths[:outputs], lengths[outputs:], subject)


def encode_json(document: Any) -> bytes:
    """Return a document in JSON."""
    return json.dumps(document).encode()


def decode_json(document: bytes | bytearray) -> dict[str, Any]:
    """Return a document in JSON, an object.

    Raises:
        ProtocolError: it is none.
    """
    try:
        found = json.loads(document)
    except ValueError as error:
        raise ProtocolError("an attached process, or its agent, sent a document that is no JSON") from error
    if not isinstance(found, dict):
        raise ProtocolError("an attached process, or its agent, sent a document that is no JSON object")
    return found
