"""JSON as dataclasses, to the letter, without the web framework. The reader of each type is made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import is_dataclass
from reprlib import repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rankmesh_agent.wire import json_text

T = TypeVar("T")
_Reader = Callable[[Any], Any]


def read(kind: type[T], text: bytes) -> T:
    """Return the dataclass that JSON text stands for; no value is converted, left out or added.

    Args:
        kind: a dataclass of numbers, strings, dataclasses, lists of these, and any of them or null.
        text: the JSON.

    Raises:
        ValueError: the text is not JSON, see ``json_text``.
        TypeError: the JSON has another structure, or a value has another type.
    """
    return from_document(kind, json_text.loads(text))


def from_document(kind: type[T], document: object) -> T:
    """Return the dataclass that a parsed document stands for; see ``read``.

    Raises:
        TypeError: the document has another structure, or a value has another type.
    """
    reader: Callable[[object], T] = _reader(kind)  # type: ignore[arg-type]  # mypy: some types are not hashable
    return reader(document)


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Return the function that checks a parsed value of a type, and returns it as this type."""
    if get_origin(kind) is list:
        return _list_reader(get_args(kind)[0])
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
        (present,) = [_reader(each) for each in get_args(kind) if each is not NoneType]
        return lambda value: None if value is None else present(value)
    allowed = get_args(kind) if get_origin(kind) is Literal else None

    def read_value(value: Any) -> Any:
        if type(value) is kind or (allowed is not None and value in allowed):
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"{repr(value):.100} is not a {kind}")

    return read_value


def _list_reader(kind: Any) -> _Reader:
    inner = _reader(kind)

    def read_list(value: Any) -> Any:
        if type(value) is not list:
            raise TypeError(f"{repr(value):.100} is not a list")
        return [inner(each) for each in value]

    return read_list


def _dataclass_reader(kind: type) -> _Reader:
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}

    def read_dataclass(value: Any) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{repr(value):.100} is not a {kind}")
        try:
            return kind(**{name: readers[name](each) for name, each in value.items()})
        except KeyError as error:
            raise TypeError(f"{kind} has no {error}") from None

    return read_dataclass
