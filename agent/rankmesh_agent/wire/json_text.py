"""JSON text from another process, and to it: as plain data, or as dataclasses, whose fields msgspec checks."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qs

import msgspec

T = TypeVar("T")

_MAX_DIGITS = 20
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_TYPES = {
    "int": "a number without a fraction",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a JSON object",
}


class InvalidBodyError(TypeError):
    """A JSON document of another structure, or with a value of another type or out of its bounds. HTTP status 422."""


def read(kind: type[T], text: bytes | bytearray) -> T:
    """Return a JSON text as a dataclass, or a list of dataclasses. Unknown members of objects are ignored.

    Raises:
        ValueError: the text is not JSON, see ``loads``.
        InvalidBodyError: it has another structure; names the field.
    """
    try:
        found: T = _decoder(kind).decode(text)  # type: ignore[arg-type]  # mypy: some types are not hashable
        return found
    except (msgspec.DecodeError, ValueError, RecursionError):
        return convert(kind, loads(text))  # raises the error, or has a lone surrogate, which msgspec's decoder refuses


def convert(kind: type[T], document: object) -> T:
    """Return a parsed document as a dataclass; see ``read``."""
    try:
        try:
            return msgspec.convert(document, kind)
        except msgspec.ValidationError:  # perhaps of 2.0, a whole number in JSON Schema, and not for msgspec
            return msgspec.convert(loads(json.dumps(document)), kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def read_query(kind: type[T], query: bytes, path: Mapping[str, str] = {}) -> T:
    """Return the parameters of a URL's query and path as a dataclass; other parameters are ignored.

    Raises:
        ValueError: a parameter has another type, or is out of its bounds.
    """
    fields: Any = kind.__dataclass_fields__  # type: ignore[attr-defined]
    values = {
        name: given if fields[name].default == () else given[-1]
        for name, given in parse_qs(query.decode("latin-1"), keep_blank_values=True).items()
        if name in fields
    }
    try:
        return msgspec.convert({**values, **path}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def encode(document: object) -> bytes:
    """Return plain data or dataclasses as JSON text."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:  # a lone surrogate, as in a file's name: JSON can have it, msgspec does not
        return json.dumps(msgspec.to_builtins(document)).encode()


def loads(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text (RFC 8259): numbers are finite, integers have at most 64 bits, 2.0 is one.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested too deep for the parser; or a number is out of range.
    """
    try:
        return _FINITE.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _MAX_DIGITS else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise ValueError("an integer in the JSON has more than 64 bits")
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number in the JSON is out of range")
    return int(number) if number.is_integer() and abs(number) <= _MOST else number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_FINITE = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_refuse)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _invalid(error: msgspec.ValidationError) -> InvalidBodyError:
    """Return the error with the field as ``body.member.rank``."""
    what, _, where = str(error).partition(" - at `$")
    place = f"body{where.rstrip('`')}"
    if missing := re.fullmatch("Object missing required field `(.+)`", what):
        return InvalidBodyError(f"{place}.{missing[1]}: is missing")
    if not where:
        return InvalidBodyError("body: must be a JSON object")
    names = re.sub("[a-z]+(?=[^`]*`)", lambda name: _TYPES.get(name[0], name[0]), what.replace(" | ", " or "))
    text = names.replace("`", "")
    return InvalidBodyError(f"{place}: {text[0].lower()}{text[1:]}")
