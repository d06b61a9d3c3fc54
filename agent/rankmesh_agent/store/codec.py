"""Commands and their results as frames of the store's binary protocol, whose bodies msgspec encodes and checks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from msgspec import DecodeError, Struct
from msgspec.msgpack import Decoder, Encoder

from rankmesh_agent.store.command import Command, Seconds
from rankmesh_agent.store.commands import COMMANDS, MultiGet
from rankmesh_agent.wire.errors import DistStoreError, InvalidValueError, ProtocolError, RankFailedError, from_document
from rankmesh_agent.wire.store_frames import HEADER, HEADER_BYTES, MAX_BYTES, Frame, RequestId, decode_header

T = TypeVar("T")


if TYPE_CHECKING:
    AnyCommand = Command[Any]
else:
    AnyCommand = functools.reduce(operator.or_, COMMANDS)


class Request(Struct, frozen=True, array_like=True):
    """A request's body.

    Attributes:
        request_id: the identity of the request that it may repeat, if any.
        timeout: time limit of a command that does not wait, for an agent that forwards it.
    """

    command: AnyCommand
    request_id: RequestId | None = None
    timeout: Seconds = 0.0


def _plain(value: Any) -> Any:
    """Return a value of a subclass of a type that msgspec encodes."""
    return str.encode(value).decode() if isinstance(value, str) else bytes(value)


_encoder = Encoder(enc_hook=_plain)
_requests = Decoder(Request)


def encode_command(
    command: Command[Any], seq: int, request_id: RequestId | None = None, timeout: float = 0.0
) -> bytearray:
    """Return a command as a frame.

    Args:
        seq: its number on the connection.

    Raises:
        InvalidValueError: the frame would be too large.
    """
    frame = bytearray()
    _encoder.encode_into(Request(command, request_id, timeout), frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > MAX_BYTES:
        raise InvalidValueError(f"{size} bytes in one call, at most {MAX_BYTES} are allowed; use several calls")
    HEADER.pack_into(frame, 0, size, seq)
    return frame


def decode_request(frame: Frame) -> Request:
    """Return the body of a request frame.

    Raises:
        DistStoreError: the command is invalid; its key is too long, for example.
        ProtocolError: the frame is malformed.
    """
    try:
        return _requests.decode(memoryview(frame)[HEADER_BYTES:])
    except (DecodeError, ValueError) as error:  # text that is not UTF-8 is a ValueError
        raise ProtocolError(f"a request of the store's binary protocol is malformed: {error}") from None


def serve(frame: Frame, execute: Callable[[Request], Any]) -> bytes:
    """Return the response frame to a request frame that ``execute`` carries out, waiting if it has to."""
    _, seq = decode_header(frame)
    try:
        return bytes(encode_result(seq, execute(decode_request(frame))))
    except (DistStoreError, RankFailedError) as error:
        return bytes(encode_error(seq, error))


def encode_result(seq: int, result: Any) -> bytearray:
    """Return a command's result as a frame."""
    frame = bytearray()
    # A list may have one large value many times: it is not encoded before its size is known.
    if not isinstance(result, list) or sum(map(len, result)) <= MAX_BYTES:
        _encoder.encode_into((None, result), frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if not 0 < size <= MAX_BYTES:
        too_large = InvalidValueError(f"the response would be over {MAX_BYTES} bytes; ask for less at a time")
        return encode_error(seq, too_large)
    HEADER.pack_into(frame, 0, size, seq)
    return frame


def encode_error(seq: int, error: DistStoreError | RankFailedError) -> bytearray:
    """Return a command's error as a frame."""
    body = _encoder.encode((error.document(), None))
    return bytearray(HEADER.pack(len(body), seq) + body)


def decode_result(command: Command[T], frame: Frame) -> T:
    """Return the result that a response frame holds.

    Raises:
        DistStoreError, RankFailedError: the command raised it in the process that has the table.
        ProtocolError: the frame is malformed.
    """
    try:
        failure, result = _responses(type(command)).decode(memoryview(frame)[HEADER_BYTES:])
        if failure is not None:
            raised = from_document(failure)
            if not isinstance(raised, DistStoreError | RankFailedError):
                raised = DistStoreError(raised.message)
        elif isinstance(command, MultiGet) and len(result) != len(command.keys):
            raise ValueError("it has another number of values than there are keys")
        else:
            found: T = result
            return found
    except (DecodeError, ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"a response of the store's binary protocol is malformed: {error}") from None
    raise raised


@functools.cache
def _responses(kind: type[Command[Any]]) -> Decoder[tuple[dict[str, Any] | None, Any]]:
    """Return the decoder of the responses to a command: T of its class is the type of its result."""
    (result, *_) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    return Decoder(tuple[dict[str, Any] | None, result | None])  # type: ignore[valid-type]
