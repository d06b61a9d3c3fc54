"""How commands and their results become frames of the fast path, and frames become them. Pure."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from rankmesh_agent.store import commands
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.condition import ALWAYS, Condition
from rankmesh_agent.wire.errors import (
    BY_CODE,
    DistStoreError,
    InvalidKeyError,
    InvalidValueError,
    NotANumberError,
    ProtocolError,
)
from rankmesh_agent.wire.store_frames import MAX_BYTES, RETRY, Kind, encode_request, encode_response

_ABSENT, _MATCH, _OTHERS = 0x01, 0x02, 0x08
"""Flags of writes with a condition: If-None-Match: *; the parts after the usual ones are the tags of If-Match; those
that begin with an exclamation mark are the tags of If-None-Match."""
_OTHER = b"!"
_JOINED = 0x04
"""Flag of commands with keys: all are in one part, with zero bytes between them, which none has: that is faster."""
_MOST_AT_ONCE = 1024
"""Most values that are cut apart by one layout, which takes memory for each."""
_MOST_REMEMBERED = 4096
"""Longest keys of a request, together, that are remembered: all ranks ask for the same ones, one after the other."""
_MOST_DIGITS = 40
"""Longest number that is added: longer ones never give a sum within 64 bits."""

T = TypeVar("T")
Parts = list[bytes]


class Form(NamedTuple):
    """How one kind of command is written.

    Attributes:
        kind: the command's class.
        parts: returns its flags and parts.
        command: makes it of parts, flags and seconds.
    """

    kind: type[Command[Any]]
    parts: Callable[[Any], tuple[int, Sequence[bytes]]]
    command: Callable[[Parts, int, float], Command[Any]]


def encode_command(command: Command[Any], seq: int, *, again: bytes = b"") -> bytes:
    """Return a command as a frame.

    Args:
        command: what to ask for.
        seq: its number on the connection.
        again: what it was when it was asked for first (RETRIED_REQUEST), if this is not the first time.

    Raises:
        InvalidValueError: it is too large.
    """
    opcode, form = _OPCODES[type(command)]
    flags, parts = form.parts(command)
    if again:
        flags, parts = flags | RETRY, [again, *parts]
    found = encode_request(opcode, flags, seq, min(command.seconds, 1e9), parts)
    if len(found) > MAX_BYTES:
        raise InvalidValueError(f"{len(found)} bytes in one call, at most {MAX_BYTES} are allowed; use several calls")
    return found


def decode_command(opcode: int, flags: int, seconds: float, parts: Parts) -> Command[Any]:
    """Return the command that a frame asks for.

    Raises:
        DistStoreError: it is one that cannot be, with a key that is too long, say.
        ProtocolError: it is none.
    """
    form = _FORMS.get(opcode)
    if form is None:
        raise ProtocolError(f"the store's fast path has no opcode {opcode}")
    try:
        return form.command(parts, flags, seconds)
    except IndexError:
        raise ProtocolError(f"a request of the store's fast path with opcode {opcode} lacks parts") from None


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
        return _answer_of(Kind.TEXTS, seq, 0, [text.encode() for text in result])
    lengths, joined = [*map(len, result)], b"".join(result)
    if joined and lengths.count(lengths[0]) == len(lengths):
        return _answer_of(Kind.EQUAL, seq, lengths[0], [joined])
    if result and b"\0" not in joined:
        return _answer_of(Kind.JOINED, seq, 0, [b"\0".join(result)])
    return _answer_of(Kind.VALUES, seq, 0, result)


def _answer_of(kind: Kind, seq: int, number: int, parts: Parts) -> bytes:
    if 4 * len(parts) + sum(map(len, parts)) > MAX_BYTES:
        return encode_error(
            seq, InvalidValueError(f"the answer would be over {MAX_BYTES} bytes; ask for less at a time")
        )
    return encode_response(kind, seq, number, parts)


def encode_error(seq: int, error: DistStoreError) -> bytes:
    """Return the error that a command raised as a frame."""
    return encode_response(Kind.ERROR, seq, 0, (error.code.encode(), error.message.encode("utf-8", "replace")))


def decode_result(command: Command[T], kind: int, number: int, parts: Parts) -> T:
    """Return what an answer means.

    Raises:
        DistStoreError: as the command raised it at the other end.
        ProtocolError: it is none.
    """
    try:
        found = _found(kind, number, parts)
        if kind in _SEVERAL and isinstance(command, commands.MultiGet) and len(command.each) != len(command.keys):
            values = dict(zip(command.each, found, strict=True))  # a key is asked for once
            found = [values[key] for key in command.keys]
    except (IndexError, ValueError):
        raise ProtocolError("an answer of the store's fast path lacks parts, or is not text") from None
    if kind == Kind.ERROR:
        raise found
    return cast(T, found)


_SEVERAL = frozenset({Kind.EQUAL, Kind.JOINED, Kind.VALUES})


def _found(kind: int, number: int, parts: Parts) -> Any:
    if kind == Kind.NUMBER:
        return number
    if kind == Kind.VALUE:
        return parts[0]
    if kind == Kind.NONE:
        return None
    if kind == Kind.BOOLEAN:
        return number != 0
    if kind == Kind.EQUAL:
        return _pieces(parts[0], number)
    if kind == Kind.JOINED:
        return parts[0].split(b"\0")
    if kind == Kind.VALUES:
        return parts
    if kind == Kind.TEXTS:
        return [part.decode() for part in parts]
    if kind == Kind.ERROR:
        error = BY_CODE.get(parts[0].decode(), DistStoreError)
        return (error if issubclass(error, DistStoreError) else DistStoreError)(parts[1].decode())
    raise ProtocolError(f"the store's fast path has no answer of kind {kind}")


def _pieces(joined: bytes, size: int) -> list[bytes]:
    count, rest = divmod(len(joined), size) if size > 0 else (0, 1)
    if rest:
        raise ValueError
    if count > _MOST_AT_ONCE:
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
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise NotANumberError(f"{part[:_MOST_DIGITS]!r} is not a number that can be added")
    return int(part)


def _condition(flags: int, tags: Parts) -> Condition:
    if not flags & (_ABSENT | _MATCH | _OTHERS):
        return ALWAYS
    others = [tag[1:] for tag in tags if tag.startswith(_OTHER)] if flags & _OTHERS else []
    wanted = [tag for tag in tags if not tag.startswith(_OTHER)] if flags & _OTHERS else tags
    return Condition(_texts(wanted) if flags & _MATCH else None, bool(flags & _ABSENT), _texts(others))


def _pairs(parts: Parts) -> tuple[tuple[str, bytes], ...]:
    if len(parts) % 2:
        raise IndexError
    return tuple(zip(_texts(parts[::2]), parts[1::2], strict=True))


def _with_keys(keys: Sequence[str]) -> tuple[int, Sequence[bytes]]:
    if keys and "\0" not in "".join(keys):
        return _JOINED, ("\0".join(keys).encode(),)
    return 0, [key.encode() for key in keys]


def _keys(parts: Parts, flags: int) -> tuple[str, ...]:
    return tuple(_text(parts[0]).split("\0")) if flags & _JOINED else _texts(parts)


def _multi_get(parts: Parts, flags: int, seconds: float) -> commands.MultiGet:
    if flags & _JOINED and len(parts[0]) <= _MOST_REMEMBERED:
        return _remembered(parts[0], seconds)
    return commands.MultiGet(_keys(parts, flags), seconds)


@functools.lru_cache(64)
def _remembered(joined: bytes, seconds: float) -> commands.MultiGet:
    return commands.MultiGet(_keys([joined], _JOINED), seconds)


def _under_condition(condition: Condition, *parts: bytes) -> tuple[int, Sequence[bytes]]:
    if condition is ALWAYS:
        return 0, parts
    flags = condition.absent * _ABSENT | (condition.tags is not None) * _MATCH | bool(condition.others) * _OTHERS
    others = (_OTHER + tag.encode() for tag in condition.others)
    return flags, [*parts, *(tag.encode() for tag in condition.tags or ()), *others]


_FORMS: dict[int, Form] = {
    1: Form(
        commands.Get,
        lambda get: (0, (get.key.encode(),)),
        lambda parts, _, seconds: commands.Get(_text(parts[0]), seconds),
    ),
    2: Form(
        commands.Set,
        lambda put: _under_condition(put.condition, put.key.encode(), put.value),
        lambda parts, flags, _: commands.Set(_text(parts[0]), parts[1], _condition(flags, parts[2:])),
    ),
    3: Form(
        commands.Delete,
        lambda delete: _under_condition(delete.condition, delete.key.encode()),
        lambda parts, flags, _: commands.Delete(_text(parts[0]), _condition(flags, parts[1:])),
    ),
    4: Form(
        commands.Add,
        lambda add: (0, (add.key.encode(), b"%d" % add.amount)),
        lambda parts, *_: commands.Add(_text(parts[0]), _amount(parts[1])),
    ),
    5: Form(
        commands.CompareSet,
        lambda swap: (0, (swap.key.encode(), swap.expected, swap.desired)),
        lambda parts, *_: commands.CompareSet(_text(parts[0]), parts[1], parts[2]),
    ),
    6: Form(
        commands.Append,
        lambda append: (0, (append.key.encode(), append.value)),
        lambda parts, *_: commands.Append(_text(parts[0]), parts[1]),
    ),
    7: Form(
        commands.MultiGet,
        lambda get: _with_keys(get.each),
        _multi_get,
    ),
    8: Form(
        commands.MultiSet,
        lambda put: (0, [part for key, value in put.values for part in (key.encode(), value)]),
        lambda parts, *_: commands.MultiSet(_pairs(parts)),
    ),
    9: Form(
        commands.Wait,
        lambda wait: _with_keys(wait.keys),
        lambda parts, flags, seconds: commands.Wait(_keys(parts, flags), seconds),
    ),
    10: Form(
        commands.Check,
        lambda check: _with_keys(check.keys),
        lambda parts, flags, _: commands.Check(_keys(parts, flags)),
    ),
    11: Form(
        commands.Keys, lambda keys: (0, (keys.prefix.encode(),)), lambda parts, *_: commands.Keys(_text(parts[0]))
    ),
    12: Form(
        commands.Count, lambda count: (0, (count.prefix.encode(),)), lambda parts, *_: commands.Count(_text(parts[0]))
    ),
    13: Form(
        commands.QueuePush,
        lambda push: (0, (push.key.encode(), push.value)),
        lambda parts, *_: commands.QueuePush(_text(parts[0]), parts[1]),
    ),
    14: Form(
        commands.QueuePop,
        lambda pop: (0, (pop.key.encode(),)),
        lambda parts, _, seconds: commands.QueuePop(_text(parts[0]), seconds),
    ),
    15: Form(
        commands.QueueLen,
        lambda length: (0, (length.key.encode(),)),
        lambda parts, *_: commands.QueueLen(_text(parts[0])),
    ),
}
"""The commands by their opcode. The numbers are the protocol: they never change."""

_OPCODES: dict[type[Command[Any]], tuple[int, Form]] = {form.kind: (opcode, form) for opcode, form in _FORMS.items()}
