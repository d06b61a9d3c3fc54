"""The methods of a store, as a table: a new kind of store implements the table instead of each method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rankmesh._stores.arguments import value_of
from rankmesh_agent.store import commands
from rankmesh_agent.store.command import Command, Waiting

T = TypeVar("T")


class Method(Generic[T]):
    """One method of a store.

    Args:
        name: its name.
        command: makes the command of its arguments.
        result: converts the result of the same method of any other store.

    Attributes:
        waits: whether it may wait.
    """

    def __init__(self, name: str, command: Callable[..., Command[T]], result: Callable[[Any], T]) -> None:
        self.name = name
        self.command = command
        self.result = result
        self.waits = isinstance(command, type) and issubclass(command, Waiting)


def _nothing(_: Any) -> None:
    return None


def _multi_set(keys: tuple[str, ...], values: list[bytes]) -> commands.MultiSet:
    return commands.MultiSet(tuple(zip(keys, values, strict=True)))


SET = Method("set", commands.Set, _nothing)
GET = Method("get", commands.Get, value_of)
ADD = Method("add", commands.Add, int)
COMPARE_SET = Method("compare_set", commands.CompareSet, value_of)
APPEND = Method("append", commands.Append, _nothing)
DELETE_KEY = Method("delete_key", commands.Delete, bool)
WAIT = Method("wait", commands.Wait, _nothing)
CHECK = Method("check", commands.Check, bool)
MULTI_GET = Method("multi_get", commands.MultiGet, lambda found: list(map(value_of, found)))
MULTI_SET = Method("multi_set", _multi_set, _nothing)
NUM_KEYS = Method("num_keys", commands.Count, int)
LIST_KEYS: Method[list[str]] = Method("list_keys", commands.Keys, list)
QUEUE_PUSH = Method("queue_push", commands.QueuePush, _nothing)
QUEUE_POP = Method("queue_pop", commands.QueuePop, value_of)
QUEUE_LEN = Method("queue_len", commands.QueueLen, int)

METHODS: tuple[Method[Any], ...] = tuple(found for found in globals().values() if isinstance(found, Method))
