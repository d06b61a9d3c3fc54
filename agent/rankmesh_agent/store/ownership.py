"""Ownership of a job's store: which rank has the keys and values, and how the next one takes over from it.

The owner is the first rank of rank 0's host that is left. All ranks of this host have its journal open, so each of
them has all that the owner has acknowledged; so has the replica, a rank of another host. If all of the host are gone,
the replica is the owner, and its host's ranks follow it alike. Other ranks do not know which rank is the replica: they
ask one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from rankmesh_agent.store.change_log import ChangeLog
from rankmesh_agent.store.journal import Journal
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.store.records import StoreState
from rankmesh_agent.store.replication import KeepaliveThread, Replica, Replicator
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.schemas import Member

_NO_WORDS = memoryview((0).to_bytes(8, "big")).cast("Q")
_NOT_OWNER = -1


class LostRanks(Protocol):
    """Returns the ranks that have failed or left."""

    def __call__(self, *, certainly: bool = False) -> set[int]:
        """Return them; if ``certainly``, without those that have only fallen silent."""


class Ownership:
    """One rank's part in the ownership of a store.

    Args:
        rank: this rank.
        members: all ranks, by rank.
        token: the job's token.
        table: the keys and values, while this rank is the owner.
        lost: returns the ranks that have failed or left, as this rank knows; with ``certainly=True`` without those that
            have only fallen silent.

    Attributes:
        words: the first is a number of the present ownership, whichever rank has it.
        mine: number of this rank's ownership. What it reads or changes in the table counts if ``words[0]`` equals it
            before and after.
        log: of the table's changes; None if this rank has never been the owner.
        replica: of the table of an owner on another host.
    """

    def __init__(self, rank: int, members: Mapping[int, Member], token: str, table: Table, lost: LostRanks) -> None:
        hosts: dict[str, list[int]] = {}
        for each in sorted(members):
            hosts.setdefault(members[each].host_id, []).append(each)
        self._rank = rank
        self._members = members
        self._token = token
        self._order = [each for ranks in hosts.values() for each in ranks]
        self._hosts = hosts
        self._host = hosts[members[rank].host_id]
        self._elsewhere = [each for each in self._order if each not in self._host]
        self._table = table
        self._lost = lost
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._keepalive: KeepaliveThread | None = None
        self._left = False
        self.words = _NO_WORDS
        self.mine = _NOT_OWNER
        self.log: ChangeLog | None = None
        self.replica = Replica()
        self._excluded: frozenset[int] = frozenset()
        if rank == self._host[0]:
            with contextlib.suppress(OSError):
                self._journal = Journal.create(members[rank].instance, rank)
                self.words = self._journal.words
        if rank == self._order[0]:
            if self._journal is None:
                self.mine = self.words[0]  # the store ends with this process
            else:
                try:
                    self._claim(self._journal, StoreState())
                except BaseException:  # no free descriptor for its first window
                    self._journal.close()
                    raise

    def start(self) -> None:
        """Open the journal of this host, and find a replica; once all ranks have made this object."""
        if self._rank != self._host[0]:
            first = self._members[self._host[0]]
            self._journal = Journal.open(first.pid, first.instance, self._rank)
            if self._journal is not None:
                self.words = self._journal.words
        if self.owned:
            self._start_keepalive()

    # State

    def holders(self, world: Collection[int]) -> Sequence[int]:
        """Return the ranks with which the store is lost, if it is: those of its first host, unless only others can be.

        Args:
            world: the ranks that are in the world now.
        """
        host = self._members[self._order[0]].host_id
        first = [rank for rank, member in sorted(self._members.items()) if member.host_id == host]
        lost = self._lost().intersection(world)
        return [rank for rank in first if rank in lost] or sorted(lost) or first

    @property
    def owned(self) -> bool:
        """True if this rank is the owner."""
        return self.words[0] == self.mine

    @property
    def can_own(self) -> bool:
        """True if this rank is the owner, or can become it."""
        return (self._journal is not None or self.owned) and not self._left

    def owner(self, excluded: Collection[int] = ()) -> int | None:
        """Return the rank that owns the store, or is to take it over; None if none is left.

        Args:
            excluded: ranks that have answered that they cannot own it.
        """
        lost = self._gone()
        journal = self._journal
        gone = {*lost, *excluded}
        if journal is not None and self.words[0]:  # otherwise no rank of this host has ever been the owner
            found = journal.owner()
            if found is not None and found not in lost:
                return found
            if found is None:
                gone.add(journal.last_owner)
        if self._rank not in gone and self._can_promote():
            return self._rank
        return next((rank for rank in self._order if rank not in gone), None)

    def referral(self) -> int | None:
        """Return the rank that a client should ask, if not this one; None if this rank never will be the owner."""
        found = self.owner()
        if found != self._rank:
            return found
        may_own = self._journal is not None and not self._left and (self.words[0] or self._can_promote())
        return found if may_own else None

    def acquire(self) -> bool:
        """Return whether this rank is the owner, after it has become so if it is its turn."""
        if self.words[0] == self.mine:
            return True
        with self._lock:
            journal = self._journal
            if journal is None or self._left:
                return False
            word = self.words[0]
            if word == self.mine:
                return True
            if self.owner() != self._rank:
                return False
            if word:
                return self._claim(journal, None, word)
            if not self._can_promote() or not self._replica_usable():
                return False
            self.replica.finish()
            return self._claim(journal, self.replica.state)

    def _can_promote(self) -> bool:
        """Return whether this rank's replica is the store, now or soon: its owner's host is gone for sure.

        The ranks of other hosts may live: an owner has one replica, and sends ABANDON to the one before.
        """
        if not self.replica.current or self.replica.owner not in self._members:
            return False
        return (self._lost(certainly=True) | self._excluded).issuperset(self._host_of_owner())

    def _replica_usable(self) -> bool:
        """Return whether nothing more can come from the owner that counts: it is gone, or excluded."""
        return self.replica.usable or not self._excluded.isdisjoint({*self._host_of_owner()} - self._lost())

    def _host_of_owner(self) -> Sequence[int]:
        """Return the ranks of the host of the replica's owner."""
        return self._hosts[self._members[self.replica.owner].host_id]

    def _gone(self) -> set[int]:
        return self._lost() | self._excluded

    def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, dead or not: the next rank takes over from an owner among them."""
        self._excluded |= {*ranks}
        if self.log is not None and self.log.replicator is not None:
            self.log.replicator.exclude(self._excluded)

    def is_excluded(self, rank: int) -> bool:
        """Return whether this rank goes on without another one."""
        return rank in self._excluded

    def ping(self) -> None:
        """Show the replica that the owner lives, or find another one."""
        log = self.log
        if log is not None and log.replicator is not None and self.owned:
            log.replicator.probe()
            with self._table.lock:
                if self.owned:
                    log.replicator.ping()

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
            if self.log is not None and self.log.replicator is not None:
                with self._table.lock:
                    self.log.replicator.close()

    def close(self) -> None:
        """Close the journal; after ``leave``."""
        if self._keepalive is not None:
            self._keepalive.stop()
        with self._lock:
            self.words = _NO_WORDS
            self._table.adopt({}, {})
            if self.log is not None and self.log.replicator is not None:
                self.log.replicator.close()
            if self._journal is not None:
                self._journal.close()

    def close_in_child(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self.words, self.mine = _NO_WORDS, _NOT_OWNER
        if self.log is not None and self.log.replicator is not None:
            self.log.replicator.close_in_child()
        if self._journal is not None:
            self._journal.close()

    def _claim(self, journal: Journal, state: StoreState | None, word: int = 0) -> bool:
        """Become the owner, if ``word`` is still the owner word.

        Args:
            journal: of this host.
            state: to begin with; None for that of the journal.
            word: the owner word on which the decision is based; 0 for the first owner on this host.
        """
        self.mine = _NOT_OWNER
        claimed = journal.claim(word)
        if claimed is None:
            return False
        mine, records = claimed
        if state is None:
            state = StoreState()
            for record in records:
                state.apply(record)
        replies = state.replies

        def log() -> ChangeLog:
            log = ChangeLog(journal, self._table, replies, self._replicator if self._elsewhere else None)
            if log.replicator is not None and not first:
                log.replicator.attach()  # or it would go on without a replica that knows nothing of it
            return log

        first = self._rank == self._order[0] and not word  # the others have not started
        try:
            self.log = self._table.adopt(state.values, state.queues, log)
        except StoreMovedError:  # the replica has taken over, as the ranks of this host were excluded
            journal.leave()
            return False
        self.mine = mine
        if not first:
            self._start_keepalive()
        return True

    def _replicator(self, snapshot: Callable[[], Iterator[list[bytes]]]) -> Replicator:
        return Replicator(
            self._rank, self._elsewhere, self._members, self._token, self._gone, self._step_down, snapshot
        )

    def _step_down(self) -> None:
        """Give up the ownership: the replica has it, as this rank was excluded."""
        if self._journal is not None:
            self._journal.leave()
        if self.owned:
            self.mine = _NOT_OWNER

    def _start_keepalive(self) -> None:
        if self._elsewhere and self._journal is not None and self._keepalive is None:
            self._keepalive = KeepaliveThread(self.ping)
            self._keepalive.start()
