"""reduce over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.hierarchical.all_reduce import reduced
from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(topology: HierarchicalLink, array: Array, op: ReduceOp, root: int) -> None:
    """Reduce inside each host, then at the root's host; of more than two hosts, each reduces a part and sends it there.

    Steps: 1 and 1 exchange a chunk, and 2 more. Of two hosts, the other one sends the array's bytes once. Of more,
    each sends and receives (hosts - 1) / hosts of them, the root's host receives as many again, and the others send
    1 / hosts again: if every host sent its array to the root's host, that would receive (hosts - 1) times the array.
    """
    topology.link.arrive()
    root_host = [topology.host_of(root)]
    all_hosts = range(len(topology.layout))
    for where, values in reduced(topology, array, op, by=root_host if len(all_hosts) == 2 else all_hosts, to=root_host):
        if topology.rank == root:
            array[where] = values
