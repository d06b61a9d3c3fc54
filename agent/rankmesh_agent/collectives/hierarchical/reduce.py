"""reduce over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.hierarchical.all_reduce import reduced
from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(hosts: HierarchicalLink, array: Array, op: ReduceOp, root: int) -> None:
    """Reduce inside each host, then at the root's; of more than two hosts each reduces a part, and sends it there.

    The result is that of all_reduce, bit for bit.

    Steps: 1 and 1 exchange a chunk, and 2 more. Of two hosts, the other one sends the array's bytes once. Of more,
    each sends and receives (hosts - 1) / hosts of them, the root's host receives as many again, and the others send
    1 / hosts again: with everything sent to the root's host, that would receive (hosts - 1) times the array.
    """
    hosts.link.all_exchange()
    home = [hosts.host_of(root)]
    everywhere = range(len(hosts.layout))
    for where, values in reduced(hosts, array, op, by=home if len(everywhere) == 2 else everywhere, to=home):
        if hosts.rank == root:
            array[where] = values
