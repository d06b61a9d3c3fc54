"""The methods of a store, as a table: a new kind of store implements the table instead of each method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rankmesh._stores.arguments import value_of

T = TypeVar("T")


class Method(Generic[T]):
    """One method of a store.

    Args:
        name: its name.
        result: converts the result of the same method of any other store.
        waits: whether it may wait.
    """

    def __init__(self, name: str, result: Callable[[Any], T], *, waits: bool = False) -> None:
        self.name = name
        self.result = result
        self.waits = waits


def _nothing(_: Any) -> None:
    return None


def _values(found: Any) -> list[bytes]:
    return list(map(value_of, found))


SET = Method("set", _nothing)
GET = Method("get", value_of, waits=True)
ADD = Method("add", int)
COMPARE_SET = Method("compare_set", value_of)
APPEND = Method("append", _nothing)
DELETE_KEY = Method("delete_key", bool)
WAIT = Method("wait", _nothing, waits=True)
CHECK = Method("check", bool)
MULTI_GET = Method("multi_get", _values, waits=True)
MULTI_SET = Method("multi_set", _nothing)
NUM_KEYS = Method("num_keys", int)
LIST_KEYS: Method[list[str]] = Method("list_keys", list)
QUEUE_PUSH = Method("queue_push", _nothing)
QUEUE_POP = Method("queue_pop", value_of, waits=True)
QUEUE_LEN = Method("queue_len", int)

METHODS: tuple[Method[Any], ...] = (
    *(SET, GET, ADD, COMPARE_SET, APPEND, DELETE_KEY),
    *(WAIT, CHECK, MULTI_GET, MULTI_SET, NUM_KEYS, LIST_KEYS),
    *(QUEUE_PUSH, QUEUE_POP, QUEUE_LEN),
)
