"""Joins at a gateway by a client alone."""

from __future__ import annotations

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.join import join
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.schemas import JoinReply, JoinRequest, Member


def join_as(client: GatewayClient, job: str, size: int, member: Member, seconds: float) -> JoinReply:
    """Join a job as a member, within some seconds."""
    return join(client, JoinRequest(job, size, member), Deadline(seconds), Settings(job=job))
