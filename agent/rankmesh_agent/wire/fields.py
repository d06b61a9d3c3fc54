"""Field types of JSON bodies: constraints beyond the Python types, for validation and for the OpenAPI document.

Pydantic finds the objects in ``Annotated`` by the names of their methods, so this module need not import pydantic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

MAX_WORLD_SIZE = 65_536
"""Maximum number of ranks of a world."""
MAX_NAME = 255
"""Maximum characters of a job's name, an instance, a host name, an address or a URL."""
MAX_ADDRESSES = 64
"""Maximum number of addresses, or URLs, of one member or agent."""

_Schema = dict[str, Any]


class _Number:
    """Validator of numbers that accepts neither truth values nor text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], _Schema]) -> _Schema:
        check = {"type": "no-info", "function": _require_number}
        return {"type": "function-before", "function": check, "schema": handler(source)}


class _Strict:
    """Validator that accepts values of the very type only, such as no number for a truth value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], _Schema]) -> _Schema:
        return handler(source) | {"strict": True}


class SchemaKeywords:
    """JSON Schema keywords of a field whose check is elsewhere and raises its own error.

    Args:
        keywords: keywords of JSON Schema.
    """

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(self, source: Any, handler: Callable[[Any], _Schema]) -> _Schema:
        return handler(source) | self._keywords


def _require_number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError(f"expected a number, got {value!r}")
    return value


NUMBER = _Number()
"""In ``Annotated``, after the bounds of a number."""

Integer = Annotated[int, NUMBER]
"""A whole number."""
Number = Annotated[float, NUMBER]
"""Any number."""
Boolean = Annotated[bool, _Strict()]
"""A truth value."""
Base64 = Annotated[
    str,
    SchemaKeywords(
        pattern=r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$", contentEncoding="base64"
    ),
]
"""Bytes in JSON."""
Name = Annotated[str, SchemaKeywords(minLength=1, maxLength=MAX_NAME, pattern=r"\S")]
"""A name, which is not blank."""
Text = Annotated[str, SchemaKeywords(maxLength=MAX_NAME)]
"""A host name, an address or a URL."""
Texts = Annotated[list[Text], SchemaKeywords(maxItems=MAX_ADDRESSES)]
Integers = Annotated[list[Integer], SchemaKeywords(maxItems=MAX_ADDRESSES)]
"""Addresses or URLs."""
Rank = Annotated[int, NUMBER, SchemaKeywords(minimum=-1, maximum=MAX_WORLD_SIZE - 1)]
"""A rank, or -1 for an unassigned one."""
WorldSize = Annotated[int, NUMBER, SchemaKeywords(minimum=1, maximum=MAX_WORLD_SIZE)]
"""The number of ranks of a world."""
Epoch = Annotated[int, NUMBER, SchemaKeywords(minimum=1)]
"""Counts the complete worlds of a job."""
