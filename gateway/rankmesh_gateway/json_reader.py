"""JSON as dataclasses, to the letter, without the web framework."""

from __future__ import annotations

import functools
import json
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(kind: type[T], text: bytes) -> T:
    """Return the dataclass that JSON text stands for; no value is converted, left out or added.

    Args:
        kind: a dataclass of numbers, strings, dataclasses, lists of these, and any of them or null.
        text: the JSON.

    Raises:
        ValueError: the text is not JSON.
        TypeError: the JSON has another structure, or a value has another type.
        RecursionError: the JSON is nested too deeply.
    """
    return from_document(kind, json.loads(text))


def from_document(kind: type[T], document: object) -> T:
    """Return the dataclass that a parsed document stands for; see ``read``.

    Raises:
        TypeError: the document has another structure, or a value has another type.
    """
    found = _value(kind, document)
    if not isinstance(found, kind):
        raise TypeError(f"{document!r:.100} is not a {kind}")
    return found


def _value(kind: Any, value: Any) -> Any:
    if get_origin(kind) is list and type(value) is list:
        (inner,) = get_args(kind)
        return [_value(inner, each) for each in value]
    if isinstance(kind, type) and is_dataclass(kind) and type(value) is dict:
        hints = _hints(kind)
        return kind(**{name: _value(hints.get(name), each) for name, each in value.items()})
    if get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
        return None if value is None else _value(next(each for each in get_args(kind) if each is not NoneType), value)
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not a {kind}")
    return value


_hints = functools.cache(get_type_hints)
