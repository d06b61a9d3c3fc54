"""Where an agent's unix socket is: both ends know it by the agent's id."""

from __future__ import annotations


def socket_path(directory: str, agent_id: str) -> str:
    """Return the path of the unix socket of an agent.

    Args:
        directory: that the agent shares memory in.
        agent_id: its id, see AgentBeat.
    """
    return f"{directory}/rankmesh-agent-{agent_id}.sock"
