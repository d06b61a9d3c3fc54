"""What a call to a store is, wherever the keys and values are.

A command knows what it does to a Table, and how it travels over HTTP: the request it makes, and what the answer to that
means. So a store is whatever carries out commands, and a new call is a class in ``commands``, a form in ``forms``,
an endpoint in ``routes/store`` and a method for users.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import DistStoreError

T = TypeVar("T")
W = TypeVar("W", bound="Waiting[Any]")


class Request(NamedTuple):
    """An HTTP request, in plain data.

    Attributes:
        method: the verb.
        path: path without query.
        params: the query.
        headers: headers besides those every request has.
        json: what the body is to say in JSON.
        content: the body itself, where it is raw bytes.
    """

    method: str
    path: str
    params: Mapping[str, str | float] = {}
    headers: Mapping[str, str] = {}
    json: Any = None
    content: bytes | None = None


class Command(ABC, Generic[T]):
    """One call to a store. T is what it returns.

    Attributes:
        name: the call's name in the API.
        writes: whether it changes something, so that it must not be carried out twice.
        seconds: how long it may wait; 0 for those that never do.
    """

    name: ClassVar[str] = ""
    writes: ClassVar[bool] = False
    seconds: float = 0.0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def try_execute(self, table: Table) -> tuple[T] | None:
        """Carry it out and return the result, as the only one of a tuple; None if it has to wait: nothing is done."""

    @abstractmethod
    def request(self) -> Request:
        """Return what to ask a server for."""

    @abstractmethod
    def result(self, answer: bytes) -> T:
        """Return what the body of the server's answer means."""

    def refused(self, error: DistStoreError) -> T:
        """Return what the server's error means, if it is a result; else raise it."""
        raise error


class Immediate(Command[T]):
    """A command that never waits."""

    @abstractmethod
    def apply(self, table: Table) -> T:
        """Carry it out."""

    def try_execute(self, table: Table) -> tuple[T]:
        return (self.apply(table),)


class Write(Immediate[T]):
    """A command that changes values."""

    writes = True

    @abstractmethod
    def plan(self, values: Values) -> tuple[T, Changes]:
        """Return the result, and the changes to make, given all values."""

    def apply(self, table: Table) -> T:
        return table.change(self.plan)


class Waiting(Command[T]):
    """A command that may have to wait. Commands that differ in ``seconds`` alone are equal."""

    @abstractmethod
    def begin(self, table: Table) -> Future[T]:
        """Return a future that completes with the result; cancel it to stop waiting."""

    @abstractmethod
    def late(self, table: Table) -> DistStoreError:
        """Return the error that says what did not appear in time."""

    def undo(self, table: Table, result: T) -> None:
        """Undo what was done for a caller who has gone before he got the result."""

    def with_timeout(self: W, seconds: float) -> W:
        """Return the same command with another time to wait."""
        return replace(self, seconds=seconds)  # type: ignore[type-var]  # the subclasses are dataclasses
