"""Ownership of a job's store: which rank has the keys and values, and how the next one takes over from it.

The owner is the first rank of rank 0's host that is left. All ranks of this host have its journal open, so each of them
has all that the owner has acknowledged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rankmesh_agent.store.change_log import ChangeLog
from rankmesh_agent.store.journal import Journal
from rankmesh_agent.store.records import State
from rankmesh_agent.store.table import Table

_NO_WORDS = memoryview((0).to_bytes(8, "big")).cast("Q")
_NOT_OWNER = -1


class Host(NamedTuple):
    """The ranks that share the journal.

    Attributes:
        ranks: in the order in which they become the owner.
        pid: process of the first one, which makes the journal.
        name: random name of the journal.
    """

    ranks: Sequence[int]
    pid: int
    name: str


class Ownership:
    """One rank's part in the ownership of a store.

    Args:
        rank: this rank.
        host: the ranks that share the journal.
        table: the keys and values, while this rank is the owner.
        lost: returns the ranks that have failed or left, as this rank knows.

    Attributes:
        words: the first is a number of the present ownership, whichever rank has it.
        mine: number of this rank's ownership. What it reads or changes in the table counts if ``words[0]`` equals it
            before and after.
        log: of the table's changes; None if this rank has never been the owner.
    """

    def __init__(self, rank: int, host: Host, table: Table, lost: Callable[[], Collection[int]]) -> None:
        self._rank = rank
        self._host = host
        self._table = table
        self._lost = lost
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._left = False
        self.words = _NO_WORDS
        self.mine = _NOT_OWNER
        self.log: ChangeLog | None = None
        if rank == host.ranks[0]:
            with contextlib.suppress(OSError):
                self._journal = Journal.create(host.name, rank)
            if self._journal is None:
                self.mine = self.words[0]  # the store ends with this process
            else:
                self.words = self._journal.words
                self._claim(self._journal, self.words[0])

    def open_journal(self) -> None:
        """Open the journal of this host; for ranks that share it, once its first rank has made it."""
        if self._rank in self._host.ranks[1:]:
            self._journal = Journal.open(self._host.pid, self._host.name, self._rank)
            if self._journal is not None:
                self.words = self._journal.words

    # State

    @property
    def holders(self) -> Sequence[int]:
        """The ranks that may have a copy of the store."""
        return self._host.ranks

    @property
    def owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.words[0] == self.mine

    @property
    def can_own(self) -> bool:
        """Whether this rank may be the owner, now or later."""
        return (self._journal is not None or self.owned) and not self._left

    def owner(self, excluded: Collection[int] = ()) -> int | None:
        """Return the rank that owns the store, or is to take it over; None if none is left.

        Args:
            excluded: ranks that have answered that they cannot own it.
        """
        lost = self._lost()
        found = None if self._journal is None else self._journal.owner()
        if found is not None and found not in lost:
            return found
        gone = {*lost, *excluded}
        if self._journal is not None and found is None:
            gone.add(self._journal.last_owner)
        return next((rank for rank in self._host.ranks if rank not in gone), None)

    def acquire(self) -> bool:
        """Return whether this rank is the owner, after it has become so if it is its turn."""
        if self.words[0] == self.mine:
            return True
        with self._lock:
            journal = self._journal
            if journal is None or self._left:
                return False
            word = self.words[0]
            return word == self.mine or (self.owner() == self._rank and self._claim(journal, word))

    def superseded(self) -> bool:
        """Return whether this rank was the owner until another one took over, once for each time."""
        with self._lock:
            if self.mine == _NOT_OWNER or self.owned:
                return False
            self.mine = _NOT_OWNER
            return True

    def leave(self) -> None:
        """Give up the ownership for good."""
        with self._lock:
            self._left = True
            self.mine = _NOT_OWNER
            if self._journal is not None:
                self._journal.leave()

    def close(self) -> None:
        """Close the journal."""
        with self._lock:
            self.words = _NO_WORDS
            self._table.adopt({}, {})
            if self._journal is not None:
                self._journal.close()

    def close_in_child(self) -> None:
        """Close the parent's descriptor in a forked child."""
        self.words, self.mine = _NO_WORDS, _NOT_OWNER
        if self._journal is not None:
            self._journal.close()

    def _claim(self, journal: Journal, word: int) -> bool:
        """Become the owner, if ``word`` is still the owner word."""
        self.mine = _NOT_OWNER
        claimed = journal.claim(word)
        if claimed is None:
            return False
        mine, records = claimed
        state = State()
        for record in records:
            state.apply(record)

        def log() -> ChangeLog:
            self.log = ChangeLog(journal, self._table, state.replies)
            return self.log

        self._table.adopt(state.values, state.queues, log)
        self.mine = mine
        return True
