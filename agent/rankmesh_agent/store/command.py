"""Base classes of the store's commands.

A command defines its effect on a Table; ``codec`` defines how it travels. So a store is an executor of commands, and a
new call is a class in ``commands``, a format in ``codec``, an HTTP route and a method for users.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import DistStoreError

T = TypeVar("T")
W = TypeVar("W", bound="Waiting[Any]")


class Command(ABC, Generic[T]):
    """One call of a store. T is the type of its result.

    Attributes:
        name: the call's name in the API.
        writes: whether it changes something, so that it must not be executed twice.
        seconds: how long it may wait; 0 for commands that never wait.
    """

    name: ClassVar[str] = ""
    writes: ClassVar[bool] = False
    seconds: float = 0.0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def try_execute(self, table: Table) -> tuple[T] | None:
        """Execute it and return a tuple of the result; None, without any effect, if it has to wait."""


class Immediate(Command[T]):
    """A command that never waits."""

    @abstractmethod
    def apply(self, table: Table) -> T:
        """Execute it."""

    def try_execute(self, table: Table) -> tuple[T]:
        return (self.apply(table),)


class Write(Immediate[T]):
    """A command that changes values."""

    writes = True

    @abstractmethod
    def plan(self, values: Values) -> tuple[T, Changes]:
        """Return the result and the changes to make, given all values."""

    def apply(self, table: Table) -> T:
        return table.change(self.plan)


class Waiting(Command[T]):
    """A command that may have to wait. Commands that differ only in ``seconds`` are equal."""

    @abstractmethod
    def start(self, table: Table) -> Future[T]:
        """Return a future that completes with the result; cancel it to stop waiting."""

    @abstractmethod
    def timeout_error(self, table: Table) -> DistStoreError:
        """Return the error that names what did not appear in time."""

    def undo(self, table: Table, result: T) -> None:
        """Undo the effect of a command whose caller left before it got the result."""

    def with_timeout(self: W, seconds: float) -> W:
        """Return the same command with another time to wait."""
        return replace(self, seconds=seconds)  # type: ignore[type-var]  # the subclasses are dataclasses
