"""The ranks of a job, as the reply to a join has them: few with their addresses, all with their hosts and processes."""

from __future__ import annotations

from rankmesh_agent.wire.schemas import JoinReply, Member


def all_members(reply: JoinReply) -> dict[int, Member]:
    """Return all ranks of a complete world, by rank.

    Those that the reply does not list have no addresses and no instance, and their ``host_id`` is a number of the
    host, unless it has a rank that the reply lists.
    """
    listed = {member.rank: member for member in reply.members}
    processes = list(reply.hosts.processes()) if reply.hosts is not None else []
    ids = {processes[rank].number: member.host_id for rank, member in listed.items()}
    return {
        rank: listed.get(rank) or Member(rank, "", host, ids.get(number, f"#{number}"), pid, [], "")
        for rank, (host, number, pid) in enumerate(processes)
    }
