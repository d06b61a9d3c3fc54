"""A group's calls on MPI: nothing comes between them and the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends.base import MONITORED, Backend, CallContext
from rankmesh_agent.backends.fingerprint import raise_mismatch, verify
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.mpi.collectives import MAX_COUNT, Collectives
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.segment import CallMismatchError
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call, OpType


class MpiBackend(Backend):
    """Hands each call to MPI. The ranks compare their calls first only where they have agreed to do so.

    Args:
        comm: the group's communicator, whose ranks are the group's; freed on ``close``.
        link: messages among the members.
        lost: the ranks that are gone, by the mesh's numbers: MPI would wait for them for ever.
        ranks: the members, by the mesh's numbers.
        compares: whether the ranks compare their calls over the link before each.
        most: see Collectives.

    Attributes:
        inside: whether a call is in MPI now, where nothing but its end, or the process's, ends it.
    """

    name: ClassVar[str] = "mpi"
    medium = "mpi"
    monitored_subject = MONITORED

    def __init__(
        self,
        comm: Any,
        link: MessageLink,
        lost: Mapping[int, object],
        ranks: Sequence[int],
        compares: bool = False,
        most: int = MAX_COUNT,
    ) -> None:
        self.in_call = False
        self._comm = comm
        self._collectives = Collectives(comm, most)
        self._link = link
        self._lost = lost
        self._ranks = ranks
        self._compares = compares
        self._error: type[Exception] = mpi().Exception

    @property
    def comm(self) -> Any:
        """The group's communicator."""
        return self._comm

    def algorithm(self, call: Call) -> Algorithm:
        if call.kind is OpType.BARRIER and call.subject == MONITORED:
            return verify
        return self._collectives.algorithm(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        if self._lost:
            watch.check(lambda: self._link.lagging(watch.seq))
        if self._compares or algorithm is verify:
            verify(self._link, watch)
            if algorithm is verify:
                return
        self.in_call = True
        try:
            algorithm(*arguments)
        except CallMismatchError:
            self.in_call = False
            raise_mismatch(self._link, watch)
        except self._error as error:
            raise DistBackendError(
                f"{watch.call} #{watch.seq}: MPI says: {error}. If the ranks may not have made the same call, "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL has them compare their calls",
                op=watch.call.name,
                seq=watch.seq,
            ) from error
        finally:
            self.in_call = False

    def close(self) -> None:
        comm, self._comm = self._comm, None
        # With a member missing, or a call under way, it might wait for ever.
        missing = any(rank in self._lost for rank in self._ranks)
        if comm is not None and not missing and not self.in_call and not mpi().Is_finalized():
            comm.Free()
