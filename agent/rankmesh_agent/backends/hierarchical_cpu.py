"""The CPU data plane of a group on several hosts: messages between them, and shared memory inside each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmesh_agent.backends import registered
from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.backends.fingerprint import raise_mismatch
from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink
from rankmesh_agent.collectives.select import OVER_HOSTS, Algorithm, algorithm
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire.errors import GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType


class HierarchicalCpuBackend(CpuBackend):
    """Runs calls over a Link and the segments of the hosts.

    Every algorithm begins by arriving at the Link, where the ranks compare their calls, whatever it does then.

    Args:
        link: messages among the members.
        ranks: global ranks of the members, by group rank.
        hosts: the same link, and the memory of this rank's host.
    """

    def __init__(self, link: MessageLink, ranks: Sequence[int], hosts: HierarchicalLink) -> None:
        super().__init__(link, ranks, None)
        self.medium = "shm+tcp"
        self._hosts: HierarchicalLink | None = hosts

    def algorithm(self, call: Call) -> Algorithm:
        if call.kind is OpType.EMPTY:
            return registered.over_link
        return algorithm(call.kind, "hosts", call.nbytes, self._link.size)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        hosts = self._hosts
        if hosts is None:
            raise GroupAbortedError("the group has been destroyed")
        here = hosts.local_ranks
        try:
            self._link.begin(watch.seq, watch.call.fingerprint, watch.wait)
            hosts.local.begin(
                watch.seq,
                watch.call.fingerprint,
                lambda missing: watch.check(lambda: [here[place] for place in missing()]),
            )
            self._quiet.run(algorithm, hosts if algorithm in OVER_HOSTS else self._link, *arguments)
        except CallMismatchError:
            raise_mismatch(self._link, watch)

    def close(self) -> None:
        self._hosts = None
