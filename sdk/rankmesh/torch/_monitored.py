"""monitored_barrier's errors in gloo's words, which scripts look for: that is the backend torch has it for."""

from __future__ import annotations

from rankmesh import _collectives
from rankmesh._call import Timeout
from rankmesh._world import ProcessGroup as MeshGroup
from rankmesh_agent.wire.deadline import seconds_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError


def monitored_barrier(mesh: MeshGroup, timeout: Timeout, wait_all_ranks: bool) -> None:
    """Wait until all ranks have come.

    Args:
        mesh: the SDK's group.
        timeout: how long to wait; the group's if None.
        wait_all_ranks: name all ranks that did not come, not only the first.

    Raises:
        CollectiveTimeoutError: ranks did not come. Rank 0 says only that, or that it had no time at all; the others say
            before that they themselves have come.
    """
    try:
        _collectives.monitored_barrier(mesh, timeout, wait_all_ranks)
    except CollectiveTimeoutError as error:
        if error.op != "monitored_barrier":
            raise
        absent = error.message.replace("monitored_barrier", "monitoredBarrier", 1)
        absent = absent[0].upper() + absent[1:]
        here = f"Rank {mesh.rank()}"
        if seconds_of(timeout, mesh._communicator.timeout) == 0:
            absent = f"{here} timed out in monitoredBarrier after 0 ms: {absent}"
        elif mesh.rank() != 0:
            reached = f"{here} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
            absent = f"{reached} from rank 0: {absent}"
        raise CollectiveTimeoutError(absent, **error.details()) from None
