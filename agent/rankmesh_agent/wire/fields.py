"""Field types of JSON bodies: constraints beyond the Python types, for the framework that validates and documents.

Pydantic asks what stands in ``Annotated`` by these methods' names, so the ground floor need not import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

MAX_WORLD_SIZE = 65_536
"""Ranks of the largest world."""
MAX_NAME = 255
"""Characters of a job's name, an instance, a host name, an address or a URL."""
MAX_ADDRESSES = 64
"""Addresses, or URLs, that one member or agent may advertise."""

_Schema = dict[str, Any]


class _Number:
    """A number has to be one: not a truth value, nor text that could be read as one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], _Schema]) -> _Schema:
        check = {"type": "no-info", "function": _refuse_others}
        return {"type": "function-before", "function": check, "schema": handler(source)}


class SchemaKeywords:
    """A field that is checked elsewhere, with an error of its own; this says in the document what holds.

    Args:
        said: keywords of JSON Schema.
    """

    def __init__(self, **said: Any) -> None:
        self._said = said

    def __get_pydantic_json_schema__(self, source: Any, handler: Callable[[Any], _Schema]) -> _Schema:
        return handler(source) | self._said


def _refuse_others(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError(f"a number is wanted, not {value!r}")
    return value


NUMBER = _Number()
"""In ``Annotated``, behind the bounds of a number."""

Integer = Annotated[int, NUMBER]
"""A whole number."""
Number = Annotated[float, NUMBER]
"""Any number."""
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
"""Addresses or URLs."""
Rank = Annotated[int, NUMBER, SchemaKeywords(minimum=-1, maximum=MAX_WORLD_SIZE - 1)]
"""A rank, or -1 for none yet."""
WorldSize = Annotated[int, NUMBER, SchemaKeywords(minimum=1, maximum=MAX_WORLD_SIZE)]
"""How many ranks a world has."""
Epoch = Annotated[int, NUMBER, SchemaKeywords(minimum=1)]
"""Counts the times a job's world came together."""
