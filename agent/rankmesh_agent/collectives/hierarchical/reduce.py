"""reduce over several hosts with several ranks each."""

from __future__ import annotations

from rankmesh_agent.collectives.hierarchical.all_reduce import reduced
from rankmesh_agent.collectives.hierarchical.hosts import Hosts
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.wire.ops import ReduceOp


def over_hosts(hosts: Hosts, array: Array, op: ReduceOp, root: int) -> None:
    """Reduce inside each host, reduce-scatter between the hosts, gather at the root's host, where the root reads.

    The result is that of all_reduce, bit for bit.

    Steps: 1 and 1 exchange a chunk, and 2 more. Each host sends and receives (hosts - 1) / hosts of the array's bytes
    once, and the root's host receives as many again; the other hosts send 1 / hosts again.
    """
    hosts.enter()
    for where, values in reduced(hosts, array, op, [hosts.host_of(root)]):
        if hosts.rank == root:
            array[where] = values
