"""Base classes of the store's commands.

A command has fields, by which msgspec encodes and checks it, and an effect on a Table. So a new call is a class in
``commands``, an HTTP route and a method for users.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import Future
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct, structs

from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import DistStoreError

Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]

T = TypeVar("T")
W = TypeVar("W", bound="Waiting[Any]")


class Command(Struct, Generic[T], frozen=True, array_like=True):
    """One call of a store. T is the type of its result. Its tag is its opcode, which never changes.

    Attributes:
        name: the call's name in the API.
        writes: whether it changes something, so that it must not be executed twice.
        seconds: how long it may wait; 0 for commands that never wait.
    """

    name: ClassVar[str] = ""
    writes: ClassVar[bool] = False
    seconds: ClassVar[float] = 0.0

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__()
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def try_execute(self, table: Table) -> tuple[T] | None:
        """Execute it and return a tuple of the result; None, without any effect, if it has to wait."""
        raise NotImplementedError


class Immediate(Command[T], frozen=True):
    """A command that never waits."""

    def apply(self, table: Table) -> T:
        """Execute it."""
        raise NotImplementedError

    def try_execute(self, table: Table) -> tuple[T]:
        return (self.apply(table),)


class Write(Immediate[T], frozen=True):
    """A command that changes values."""

    writes = True

    def plan(self, values: Values) -> tuple[T, Changes]:
        """Return the result and the changes to make, given all values."""
        raise NotImplementedError

    def apply(self, table: Table) -> T:
        return table.change(self.plan)


class Waiting(Command[T], frozen=True):
    """A command that may have to wait, for its ``seconds``."""

    def start(self, table: Table) -> Future[T]:
        """Return a future that completes with the result; cancel it to stop waiting."""
        raise NotImplementedError

    def timeout_error(self, table: Table) -> DistStoreError:
        """Return the error that names what did not appear in time."""
        raise NotImplementedError

    def undo(self, table: Table, result: T) -> None:
        """Undo the effect of a command whose caller left before it got the result."""

    def with_timeout(self: W, seconds: float) -> W:
        """Return the same command with another time to wait."""
        return structs.replace(self, seconds=seconds)
