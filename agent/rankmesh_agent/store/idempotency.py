"""What was answered to requests that may come again."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from rankmesh_agent.store.command import Command
from rankmesh_agent.wire.errors import IdempotencyKeyReusedError

KEPT_SECONDS = 60.0
"""How long an answer is kept: longer than a client tries."""
MOST_KEPT = 4096
"""How many answers are kept."""

T = TypeVar("T")


class _Given(NamedTuple):
    command: int
    answer: Future[Any]
    at: float


class Answers:
    """Answers by the name their request has, the youngest MOST_KEPT of the last KEPT_SECONDS.

    An answer is a future: it may not be there yet when its request comes again.
    """

    def __init__(self) -> None:
        self._given: OrderedDict[str, _Given] = OrderedDict()

    def to(self, name: str, command: Command[T]) -> Future[T] | None:
        """Return the answer to the request of this name, None if there is none.

        Raises:
            IdempotencyKeyReusedError: the name is another request's.
        """
        given = self._given.get(name)
        if given is None:
            return None
        if given.command != hash(command):
            raise IdempotencyKeyReusedError(f"Idempotency-Key {name!r} was another request's; make a new one for each")
        return given.answer

    def keep(self, name: str, command: Command[T], answer: Future[T]) -> None:
        """Keep an answer, in the place of an earlier one."""
        now = time.monotonic()
        self._given.pop(name, None)
        self._given[name] = _Given(hash(command), answer, now)
        while len(self._given) > MOST_KEPT or next(iter(self._given.values())).at < now - KEPT_SECONDS:
            self._given.popitem(last=False)

    def drop(self, name: str, answer: Future[Any]) -> bool:
        """Forget an answer; return False if another one has taken its place."""
        given = self._given.get(name)
        if given is None or given.answer is not answer:
            return False
        del self._given[name]
        return True
