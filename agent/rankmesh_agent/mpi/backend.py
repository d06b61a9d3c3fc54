"""MPI backend of a group: its collectives, its point-to-point messages, and the watchdog of both.

The watchdog ends a call that cannot end by itself: it aborts the group at all members. With ULFM it revokes the
communicator, which ends the call; without, nothing interrupts the call, so the watchdog logs the error, and ends the
job with MPI_Abort.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends.base import MONITORED, Backend, CallContext
from rankmesh_agent.backends.fingerprint import raise_mismatch, verify
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.call_monitor import CallMonitor
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.mpi.collectives import Collectives
from rankmesh_agent.mpi.library import fault_classes, mpi
from rankmesh_agent.mpi.messages import MpiMessages, poll_orphaned
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire.errors import DistBackendError, DistError
from rankmesh_agent.wire.object_records import OBJECTS
from rankmesh_agent.wire.ops import Call, OpType

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0
"""Time that a call has to end by itself before the job is ended."""

_log = logging.getLogger("rankmesh")
WATCHDOG = Watchdog("rankmesh-mpi-watchdog", _GRACE_SECONDS + 1)
_VERDICT_SECONDS = 15.0
"""Time that the mesh has to name the dead rank behind an error of MPI: milliseconds do, or 10 s for a silent host."""


class MpiBackend(Backend):
    """Runs a group's collectives in MPI without a layer in between, transports its messages, and watches both.

    Args:
        comm: mpi4py's communicator of the group; ``close`` frees it.
        compare_calls: whether the members compare their calls over the link before each.
    """

    name: ClassVar[str] = "mpi"
    medium = "mpi"
    monitored_subject = MONITORED
    messages: MpiMessages

    def __init__(self, group: LocalCommunicator, comm: Any, compare_calls: bool) -> None:
        self.comm = comm
        self.messages = MpiMessages(comm, group)
        self._collectives = Collectives(comm)
        self._group = group
        self._link = group.link
        self._lost = group.engine.lost_peers  # for which MPI would wait without end
        self._compare_calls = compare_calls
        self._error: Any = mpi().Exception
        self._faults = fault_classes()
        self._in_call = False  # inside MPI
        self._monitor = CallMonitor(group.state, group.link.calls)
        if group.size > 1:
            WATCHDOG.add(self._check)

    def algorithm(self, call: Call) -> Algorithm:
        if call.kind is OpType.BARRIER and call.subject == MONITORED:
            return verify
        return self._collectives.algorithm(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        if self._lost:
            context.check(lambda: self._link.calls.missing(context.seq))
        if self._compare_calls or algorithm is verify or context.call.subject == OBJECTS:
            verify(self._link, context)
            if algorithm is verify:
                return
        self._in_call = True
        try:
            algorithm(*arguments)
        except CallMismatchError:
            self._in_call = False
            raise_mismatch(self._link, context)
        except self._error as error:
            if error.Get_error_class() in self._faults:
                self._revoke()  # the other members' calls end
                raise_failure(self._group)
            raise DistBackendError(
                f"{context.call} #{context.seq}: MPI error: {error}. If the ranks may not have made the same call, "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL has them compare their calls",
                op=context.call.name,
                seq=context.seq,
            ) from error
        finally:
            self._in_call = False

    def _revoke(self) -> None:
        """End the calls of all members on the communicator."""
        self.comm.Revoke()
        # A send of Open MPI 5.0.11 that begins to wait now may miss it, but every revocation wakes all waits.
        alone = mpi().COMM_SELF.Dup()
        alone.Revoke()
        alone.Free()

    def _check(self) -> float:
        """Progress the messages, and end the call inside MPI if it cannot complete; see group.watchdog.Check."""
        poll_orphaned()
        state = self._group.state
        if state.failure is None:
            self.messages.progress()
        call, seq, started_at = state.call, state.seq, state.started_at
        if not state.engine.closed:
            self._monitor.progress()
            if started_at is not None and self._in_call and state.seq == seq:
                error = self._monitor.error(seq, call.fingerprint, str(call), state.deadline)
                if error is not None and self._in_call and state.seq == seq:
                    self._end(error, seq)
        return _POLL_SECONDS

    def _end(self, error: DistError, seq: int) -> None:
        """Abort the group because of an error, and end the call: by MPI, else with the job, and log the error then."""
        state = self._group.state
        if self._faults:
            state.abort(error)
            self._revoke()
            return
        _log.critical(
            "%s: %s. MPI lets nothing end this call but the end of the job: rank %d ends it",
            type(error).__name__,
            error.message,
            state.global_rank(state.engine.rank),
        )
        state.abort(error)
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            if not self._in_call or state.seq != seq:
                return
            time.sleep(_POLL_SECONDS / 10)
        mpi().COMM_WORLD.Abort(1)

    def on_peer_lost(self) -> None:
        WATCHDOG.wake()

    def leave(self) -> None:
        WATCHDOG.remove(self._check)
        self._monitor.report_latest()  # ranks in a later call learn that this rank does not make it
        with self._group.engine.lock:
            self.messages.close()

    def close(self) -> None:
        comm, self.comm = self.comm, None
        # With a lost member or an active call, Free could wait without end, unless MPI knows of deaths.
        missing = not self._faults and any(rank in self._lost for rank in self._group.ranks)
        if comm is not None and not missing and not self._in_call and not mpi().Is_finalized():
            comm.Free()


def raise_failure(group: LocalCommunicator) -> None:
    """Raise the failure of a group once the mesh knows it, after an error of MPI about a dead rank."""
    group.engine.wait(lambda: group.state.failure is not None, Deadline(_VERDICT_SECONDS))
    group.state.raise_if_failed()
