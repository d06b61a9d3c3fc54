"""Commands and their results as frames of the store's binary protocol. Pure: no I/O happens here."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rankmesh_agent.store import commands
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.condition import ALWAYS, Condition
from rankmesh_agent.store.keys import MAX_KEYS
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import (
    BY_CODE,
    DistStoreError,
    InvalidKeyError,
    InvalidValueError,
    NotANumberError,
    ProtocolError,
    RankFailedError,
)
from rankmesh_agent.wire.store_frames import (
    MAX_BYTES,
    Kind,
    RequestId,
    Response,
    decode_parts,
    decode_request,
    encode_request,
    encode_response,
)

_ABSENT, _MATCH, _NONE_MATCH = 0x01, 0x02, 0x08
"""Flags of writes with a condition: If-None-Match: *; the tags of If-Match follow the usual parts; so do the tags of
If-None-Match, after an exclamation mark each."""
_NONE_MATCH_MARK = b"!"
_JOINED = 0x04
"""Flag of commands with keys: one part has all keys, separated by zero bytes, which none of them has: it is faster."""
_MAX_UNPACKED = 1024
"""Maximum number of values that one struct layout unpacks; a layout takes memory for each."""
_MAX_CACHED = 4096
"""Maximum length of the keys of a cached multi_get, together: all ranks request the same keys, one after the other."""
_MAX_DIGITS = 40
"""Maximum digits of an amount: a longer one never gives a sum within 64 bits."""

T = TypeVar("T")
Parts = list[bytes]


class Format(NamedTuple):
    """The frame format of one command.

    Attributes:
        kind: the command's class.
        parts: returns a command's flags and parts.
        command: returns the command of parts, flags and seconds.
    """

    kind: type[Command[Any]]
    parts: Callable[[Any], tuple[int, Sequence[bytes]]]
    command: Callable[[Parts, int, float], Command[Any]]


def encode_command(command: Command[Any], seq: int, request_id: RequestId | None = None, timeout: float = 0.0) -> bytes:
    """Return a command as a frame.

    Args:
        command: the command.
        seq: its number on the connection.
        request_id: the identity of the request that it may repeat, if any.
        timeout: time limit of a command that does not wait, for an agent that forwards it to the owner.

    Raises:
        InvalidValueError: the frame would be too large.
    """
    opcode, format = _OPCODES[type(command)]
    flags, parts = format.parts(command)
    if request_id is not None:
        flags, parts = flags | request_id.flags(), [request_id.encode(), *parts]
    seconds = timeout if timeout and not isinstance(command, Waiting) else command.seconds
    found = encode_request(opcode, flags, seq, min(seconds, 1e9), parts)
    if len(found) > MAX_BYTES:
        raise InvalidValueError(f"{len(found)} bytes in one call, at most {MAX_BYTES} are allowed; use several calls")
    return found


def decode_command(opcode: int, flags: int, seconds: float, parts: Parts) -> Command[Any]:
    """Return the command of a request frame.

    Raises:
        DistStoreError: the command is invalid; its key is too long, for example.
        ProtocolError: the frame is malformed.
    """
    format = _FORMATS.get(opcode)
    if format is None:
        raise ProtocolError(f"the store's binary protocol has no opcode {opcode}")
    try:
        return format.command(parts, flags, seconds)
    except IndexError:
        raise ProtocolError(f"a request of the store's binary protocol with opcode {opcode} lacks parts") from None


def serve(request: bytes | bytearray, execute: Callable[[Command[Any]], Any]) -> bytes:
    """Return the response frame to a request frame whose command ``execute`` carries out, waiting if it has to.

    Raises:
        ProtocolError: the request is malformed.
    """
    opcode, flags, seq, count, _, seconds = decode_request(request)
    try:
        return encode_result(seq, execute(decode_command(opcode, flags, seconds, decode_parts(request, count))))
    except (DistStoreError, RankFailedError) as error:
        return encode_error(seq, error)


def encode_result(seq: int, result: Any) -> bytes:
    """Return a command's result as a frame."""
    if result is None:
        return encode_response(Kind.NONE, seq, 0, ())
    if isinstance(result, bytes):
        return encode_response(Kind.VALUE, seq, 0, (result,))
    if isinstance(result, bool):
        return encode_response(Kind.BOOLEAN, seq, result, ())
    if isinstance(result, int):
        return encode_response(Kind.NUMBER, seq, result, ())
    if result and isinstance(result[0], str):
        return _encode_list(Kind.TEXTS, seq, 0, [text.encode() for text in result])
    lengths, joined = [*map(len, result)], b"".join(result)
    if joined and lengths.count(lengths[0]) == len(lengths):
        return _encode_list(Kind.EQUAL, seq, lengths[0], [joined])
    if result and b"\0" not in joined:
        return _encode_list(Kind.JOINED, seq, 0, [b"\0".join(result)])
    return _encode_list(Kind.VALUES, seq, 0, result)


def _encode_list(kind: Kind, seq: int, number: int, parts: Parts) -> bytes:
    if 4 * len(parts) + sum(map(len, parts)) > MAX_BYTES:
        return encode_error(
            seq, InvalidValueError(f"the response would be over {MAX_BYTES} bytes; ask for less at a time")
        )
    return encode_response(kind, seq, number, parts)


def encode_error(seq: int, error: DistStoreError | RankFailedError) -> bytes:
    """Return a command's error as a frame."""
    parts = [error.code.encode(), error.message.encode("utf-8", "replace")]
    if error.ranks:
        parts.append(json.dumps(error.details()).encode())
    return encode_response(Kind.ERROR, seq, 0, parts)


def decode_result(command: Command[T], header: Response, data: bytes | bytearray) -> T:
    """Return the result that a response frame holds, given its header.

    Raises:
        DistStoreError, RankFailedError: the command raised it in the owner's process.
        ProtocolError: the frame is malformed.
    """
    kind, _, count, _, number = header
    found: Any
    try:
        parts = decode_parts(data, count) if count else []
        if kind == Kind.NUMBER:
            found = number
        elif kind == Kind.VALUE:
            found = parts[0]
        elif kind == Kind.NONE:
            found = None
        elif kind == Kind.BOOLEAN:
            found = number != 0
        elif kind in (Kind.EQUAL, Kind.JOINED, Kind.VALUES):
            found = _values(kind, parts, number, len(command.unique) if isinstance(command, commands.MultiGet) else 0)
        elif kind == Kind.TEXTS:
            found = [part.decode() for part in parts]
        elif kind == Kind.ERROR:
            error = BY_CODE.get(parts[0].decode(), DistStoreError)
            known = error if issubclass(error, DistStoreError | RankFailedError) else DistStoreError
            found = known(parts[1].decode(), **(json_text.loads(parts[2]) if len(parts) > 2 else {}))
        else:
            raise ProtocolError(f"the store's binary protocol has no response of kind {kind}")
        if type(found) is list and isinstance(command, commands.MultiGet) and len(command.unique) != len(command.keys):
            values = dict(zip(command.unique, found, strict=True))  # the request has each key once
            found = [values[key] for key in command.keys]
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ProtocolError("a response of the store's binary protocol lacks parts, or is not text") from None
    if kind == Kind.ERROR:
        raise found
    result: T = found
    return result


def _values(kind: int, parts: Parts, number: int, count: int) -> list[bytes]:
    """Return the values in a response; raise a ValueError, before each takes memory, unless there are ``count``."""
    if kind == Kind.EQUAL:
        return _split(parts[0], number, count)
    if count != (len(parts) if kind == Kind.VALUES else parts[0].count(b"\0") + 1):
        raise ValueError
    return parts if kind == Kind.VALUES else parts[0].split(b"\0")


def _split(joined: bytes, size: int, count: int) -> list[bytes]:
    if size <= 0 or len(joined) != size * count:
        raise ValueError
    if count > _MAX_UNPACKED:
        return [joined[begin : begin + size] for begin in range(0, len(joined), size)]
    return [*struct.unpack(f"{size}s" * count, joined)]


def _text(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        raise InvalidKeyError(f"key {part[:32]!r} is not UTF-8") from None


def _texts(parts: Parts) -> tuple[str, ...]:
    return tuple(map(_text, parts))


def _amount(part: bytes) -> int:
    digits = part.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise NotANumberError(f"{part[:_MAX_DIGITS]!r} is not a number that can be added")
    return int(part)


def _condition(flags: int, tags: Parts) -> Condition:
    if not flags & (_ABSENT | _MATCH | _NONE_MATCH):
        return ALWAYS
    none_match = [tag[1:] for tag in tags if tag.startswith(_NONE_MATCH_MARK)] if flags & _NONE_MATCH else []
    match = [tag for tag in tags if not tag.startswith(_NONE_MATCH_MARK)] if flags & _NONE_MATCH else tags
    return Condition(_texts(match) if flags & _MATCH else None, bool(flags & _ABSENT), _texts(none_match))


def _pairs(parts: Parts) -> tuple[tuple[str, bytes], ...]:
    if len(parts) % 2:
        raise IndexError
    return tuple(zip(_texts(parts[::2]), parts[1::2], strict=True))


def _with_keys(keys: Sequence[str]) -> tuple[int, Sequence[bytes]]:
    if keys and "\0" not in "".join(keys):
        return _JOINED, ("\0".join(keys).encode(),)
    return 0, [key.encode() for key in keys]


def _keys(parts: Parts, flags: int) -> tuple[str, ...]:
    if not flags & _JOINED:
        return _texts(parts)
    if parts[0].count(b"\0") >= MAX_KEYS:  # refused before each takes memory
        raise InvalidKeyError(f"over {MAX_KEYS} keys in one call; use several calls")
    return tuple(_text(parts[0]).split("\0"))


def _multi_get(parts: Parts, flags: int, seconds: float) -> commands.MultiGet:
    if flags & _JOINED and len(parts[0]) <= _MAX_CACHED:
        return _cached_multi_get(parts[0], seconds)
    return commands.MultiGet(_keys(parts, flags), seconds)


@functools.lru_cache(64)
def _cached_multi_get(joined: bytes, seconds: float) -> commands.MultiGet:
    return commands.MultiGet(_keys([joined], _JOINED), seconds)


def _with_condition(condition: Condition, *parts: bytes) -> tuple[int, Sequence[bytes]]:
    if condition is ALWAYS:
        return 0, parts
    flags = condition.if_absent * _ABSENT
    flags |= (condition.if_match is not None) * _MATCH | bool(condition.if_none_match) * _NONE_MATCH
    none_match = (_NONE_MATCH_MARK + tag.encode() for tag in condition.if_none_match)
    return flags, [*parts, *(tag.encode() for tag in condition.if_match or ()), *none_match]


def _key(command: Any) -> tuple[int, Sequence[bytes]]:
    return 0, (command.key.encode(),)


def _key_and_value(command: Any) -> tuple[int, Sequence[bytes]]:
    return 0, (command.key.encode(), command.value)


def _prefix(command: Any) -> tuple[int, Sequence[bytes]]:
    return 0, (command.prefix.encode(),)


_FORMATS: dict[int, Format] = {
    1: Format(commands.Get, _key, lambda parts, _, seconds: commands.Get(_text(parts[0]), seconds)),
    2: Format(
        commands.Set,
        lambda put: _with_condition(put.condition, put.key.encode(), put.value),
        lambda parts, flags, _: commands.Set(_text(parts[0]), parts[1], _condition(flags, parts[2:])),
    ),
    3: Format(
        commands.Delete,
        lambda delete: _with_condition(delete.condition, delete.key.encode()),
        lambda parts, flags, _: commands.Delete(_text(parts[0]), _condition(flags, parts[1:])),
    ),
    4: Format(
        commands.Add,
        lambda add: (0, (add.key.encode(), b"%d" % add.amount)),
        lambda parts, *_: commands.Add(_text(parts[0]), _amount(parts[1])),
    ),
    5: Format(
        commands.CompareSet,
        lambda swap: (0, (swap.key.encode(), swap.expected, swap.desired)),
        lambda parts, *_: commands.CompareSet(_text(parts[0]), parts[1], parts[2]),
    ),
    6: Format(commands.Append, _key_and_value, lambda parts, *_: commands.Append(_text(parts[0]), parts[1])),
    7: Format(commands.MultiGet, lambda get: _with_keys(get.unique), _multi_get),
    8: Format(
        commands.MultiSet,
        lambda put: (0, [part for key, value in put.values for part in (key.encode(), value)]),
        lambda parts, *_: commands.MultiSet(_pairs(parts)),
    ),
    9: Format(
        commands.Wait,
        lambda wait: _with_keys(wait.keys),
        lambda parts, flags, seconds: commands.Wait(_keys(parts, flags), seconds),
    ),
    10: Format(
        commands.Check,
        lambda check: _with_keys(check.keys),
        lambda parts, flags, _: commands.Check(_keys(parts, flags)),
    ),
    11: Format(commands.Keys, _prefix, lambda parts, *_: commands.Keys(_text(parts[0]))),
    12: Format(commands.Count, _prefix, lambda parts, *_: commands.Count(_text(parts[0]))),
    13: Format(commands.QueuePush, _key_and_value, lambda parts, *_: commands.QueuePush(_text(parts[0]), parts[1])),
    14: Format(commands.QueuePop, _key, lambda parts, _, seconds: commands.QueuePop(_text(parts[0]), seconds)),
    15: Format(commands.QueueLen, _key, lambda parts, *_: commands.QueueLen(_text(parts[0]))),
}
"""The commands by opcode. The numbers are part of the protocol: they never change."""

_OPCODES: dict[type[Command[Any]], tuple[int, Format]] = {
    format.kind: (opcode, format) for opcode, format in _FORMATS.items()
}
