"""How commands and their results become frames of the fast path, and frames become them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import (
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    MultiGet,
    MultiSet,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.condition import ALWAYS, Condition
from rankmesh_agent.wire.errors import (
    BY_CODE,
    DistStoreError,
    InvalidKeyError,
    InvalidValueError,
    NotANumberError,
    ProtocolError,
)
from rankmesh_agent.wire.store_frames import AGAIN, MAX_BYTES, Kind, encode_answer, encode_request

_ABSENT, _MATCH = 0x01, 0x02
"""Flags of writes with a condition: If-None-Match: *; the parts after the usual ones are those of If-Match."""
_MOST_DIGITS = 40
"""Longest number that is added: longer ones never give a sum within 64 bits."""

T = TypeVar("T")
Parts = list[bytes]


class Form(NamedTuple):
    """How one kind of command is written.

    Attributes:
        kind: the command's class.
        parts: returns its parts.
        command: makes it of parts, flags and seconds.
    """

    kind: type[Command[Any]]
    parts: Callable[[Any], Sequence[bytes]]
    command: Callable[[Parts, int, float], Command[Any]]


def request(command: Command[Any], seq: int, *, again: bytes = b"") -> bytes:
    """Return a command as a frame.

    Args:
        command: what to ask for.
        seq: its number on the connection.
        again: what it was when it was asked for first (EARLIER), if this is not the first time.

    Raises:
        InvalidValueError: it is too large.
    """
    opcode = _OPCODES[type(command)]
    parts = _FORMS[opcode].parts(command)
    flags = 0
    if isinstance(command, Set | Delete) and command.condition is not ALWAYS:
        condition = command.condition
        flags = condition.absent * _ABSENT | (condition.tags is not None) * _MATCH
        parts = [*parts, *(tag.encode() for tag in condition.tags or ())]
    if again:
        flags, parts = flags | AGAIN, [again, *parts]
    seconds = min(command.seconds, 1e9) if isinstance(command, Waiting) else 0.0
    found = encode_request(opcode, flags, seq, seconds, parts)
    if len(found) > MAX_BYTES:
        raise InvalidValueError(f"{len(found)} bytes in one call, at most {MAX_BYTES} are allowed; use several calls")
    return found


def command_of(opcode: int, flags: int, seconds: float, parts: Parts) -> Command[Any]:
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


def answer(seq: int, result: Any) -> bytes:
    """Return a command's result as a frame."""
    if result is None:
        return encode_answer(Kind.NOTHING, seq, 0, ())
    if isinstance(result, bytes):
        return encode_answer(Kind.VALUE, seq, 0, (result,))
    if isinstance(result, bool):
        return encode_answer(Kind.BOOLEAN, seq, result, ())
    if isinstance(result, int):
        return encode_answer(Kind.NUMBER, seq, result, ())
    texts = bool(result) and isinstance(result[0], str)
    parts = [text.encode() for text in result] if texts else result
    if 4 * len(parts) + sum(map(len, parts)) > MAX_BYTES:
        return refusal(seq, InvalidValueError(f"the answer would be over {MAX_BYTES} bytes; ask for less at a time"))
    return encode_answer(Kind.TEXTS if texts else Kind.VALUES, seq, 0, parts)


def refusal(seq: int, error: DistStoreError) -> bytes:
    """Return the error that a command raised as a frame."""
    return encode_answer(Kind.REFUSED, seq, 0, (error.code.encode(), error.message.encode("utf-8", "replace")))


def result(command: Command[T], kind: int, number: int, parts: Parts) -> T:
    """Return what an answer means.

    Raises:
        DistStoreError: as the command raised it at the other end.
        ProtocolError: it is none.
    """
    try:
        found = _result(kind, number, parts)
        if kind == Kind.VALUES and isinstance(command, MultiGet) and len(command.each) != len(command.keys):
            values = dict(zip(command.each, parts, strict=True))  # a key is asked for once
            found = [values[key] for key in command.keys]
    except (IndexError, ValueError):
        raise ProtocolError("an answer of the store's fast path lacks parts, or is not text") from None
    if kind == Kind.REFUSED:
        raise found
    return cast(T, found)


def _result(kind: int, number: int, parts: Parts) -> Any:
    if kind == Kind.NUMBER:
        return number
    if kind == Kind.VALUE:
        return parts[0]
    if kind == Kind.NOTHING:
        return None
    if kind == Kind.BOOLEAN:
        return number != 0
    if kind == Kind.VALUES:
        return parts
    if kind == Kind.TEXTS:
        return [part.decode() for part in parts]
    if kind == Kind.REFUSED:
        error = BY_CODE.get(parts[0].decode(), DistStoreError)
        return (error if issubclass(error, DistStoreError) else DistStoreError)(parts[1].decode())
    raise ProtocolError(f"the store's fast path has no answer of kind {kind}")


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
    if not flags & (_ABSENT | _MATCH):
        return ALWAYS
    return Condition(_texts(tags) if flags & _MATCH else None, bool(flags & _ABSENT))


def _pairs(parts: Parts) -> tuple[tuple[str, bytes], ...]:
    if len(parts) % 2:
        raise IndexError
    return tuple(zip(_texts(parts[::2]), parts[1::2], strict=True))


def _encoded(keys: Sequence[str]) -> Parts:
    return [key.encode() for key in keys]


_FORMS: dict[int, Form] = {
    1: Form(Get, lambda get: (get.key.encode(),), lambda parts, _, seconds: Get(_text(parts[0]), seconds)),
    2: Form(
        Set,
        lambda put: (put.key.encode(), put.value),
        lambda parts, flags, _: Set(_text(parts[0]), parts[1], _condition(flags, parts[2:])),
    ),
    3: Form(
        Delete,
        lambda delete: (delete.key.encode(),),
        lambda parts, flags, _: Delete(_text(parts[0]), _condition(flags, parts[1:])),
    ),
    4: Form(
        Add,
        lambda add: (add.key.encode(), b"%d" % add.amount),
        lambda parts, *_: Add(_text(parts[0]), _amount(parts[1])),
    ),
    5: Form(
        CompareSet,
        lambda swap: (swap.key.encode(), swap.expected, swap.desired),
        lambda parts, *_: CompareSet(_text(parts[0]), parts[1], parts[2]),
    ),
    6: Form(
        Append,
        lambda append: (append.key.encode(), append.value),
        lambda parts, *_: Append(_text(parts[0]), parts[1]),
    ),
    7: Form(MultiGet, lambda get: _encoded(get.each), lambda parts, _, seconds: MultiGet(_texts(parts), seconds)),
    8: Form(
        MultiSet,
        lambda put: [part for key, value in put.values for part in (key.encode(), value)],
        lambda parts, *_: MultiSet(_pairs(parts)),
    ),
    9: Form(Wait, lambda wait: _encoded(wait.keys), lambda parts, _, seconds: Wait(_texts(parts), seconds)),
    10: Form(Check, lambda check: _encoded(check.keys), lambda parts, *_: Check(_texts(parts))),
    11: Form(Keys, lambda keys: (keys.prefix.encode(),), lambda parts, *_: Keys(_text(parts[0]))),
    12: Form(Count, lambda count: (count.prefix.encode(),), lambda parts, *_: Count(_text(parts[0]))),
    13: Form(
        QueuePush,
        lambda push: (push.key.encode(), push.value),
        lambda parts, *_: QueuePush(_text(parts[0]), parts[1]),
    ),
    14: Form(QueuePop, lambda pop: (pop.key.encode(),), lambda parts, _, seconds: QueuePop(_text(parts[0]), seconds)),
    15: Form(QueueLen, lambda length: (length.key.encode(),), lambda parts, *_: QueueLen(_text(parts[0]))),
}
"""The commands by their opcode. The numbers are the protocol: they never change."""

_OPCODES: dict[type[Command[Any]], int] = {form.kind: opcode for opcode, form in _FORMS.items()}
