"""The store of the agent that owns the keys and values."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.store.command import Command, Immediate, Waiting
from rankmesh_agent.store.idempotency import Answers
from rankmesh_agent.store.table import Table

T = TypeVar("T")


class MemoryStore(AsyncStore):
    """Keys and values in this process, for several threads and event loops at a time.

    Attributes:
        table: the same keys and values for callers that have no event loop: BlockingMemoryStore takes it.
    """

    def __init__(self) -> None:
        self.table = Table()
        self._answers = Answers()

    async def execute(self, command: Command[T], once: str = "") -> T:
        if not once:
            return await self._outcome(command, self._begun(command), once)
        before = self._answers.to(once, command)
        # Who comes again has no use for its earlier request: that gives way, and leaves us what it was given already.
        future = self._begun(command) if before is None or before.cancel() else _done(before.result())
        self._answers.keep(once, command, future)
        return await self._outcome(command, future, once)

    def cancel_waits(self) -> None:
        self.table.close()

    async def close(self) -> None:
        """Nothing to let go of."""

    def _begun(self, command: Command[T]) -> Future[T]:
        self.table.count_call(command.name)
        if isinstance(command, Waiting):
            return command.begin(self.table)
        assert isinstance(command, Immediate)
        return _done(command.apply(self.table))

    async def _outcome(self, command: Command[T], future: Future[T], once: str) -> T:
        if future.done() and not future.cancelled():
            return future.result()
        assert isinstance(command, Waiting)
        import asyncio  # it is here by now; a rank that nobody asks over HTTP goes without, which saves 8 MB

        try:
            await asyncio.wait([asyncio.wrap_future(future)], timeout=max(0.0, command.seconds))
        except BaseException:  # the caller has gone
            if not future.cancel() and (not once or self._answers.drop(once, future)):
                command.undo(self.table, future.result())
            raise
        if future.cancel():
            raise command.late(self.table)
        return future.result()


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
