"""Communicators for arrays on GPUs: selected when a group's first such array is passed."""

from __future__ import annotations

import os
from typing import cast

from rankmesh._session.backend import require_available
from rankmesh._session.process_group import Group, ProcessGroup
from rankmesh._session.session import communicator_of, require_session
from rankmesh_agent.config.env import shares_gpus
from rankmesh_agent.gpu.selection import GpuBackendSelector
from rankmesh_agent.group.communicator import Communicator


def for_collectives(group: Group, device: int) -> Communicator:
    """Return the communicator for collectives on arrays on a GPU; the host's if they go through host memory."""
    found = cast(ProcessGroup, require_session().group if group is None else group)
    selector = found._communicator.gpus or _selector(found)
    return communicator_of(group) if selector is None else selector.for_collectives(device)


def for_messages(group: Group, device: int, peer: int | None) -> Communicator:
    """Return the communicator for messages of arrays on a GPU to or from a group rank (None: any)."""
    selector = _selector(group)
    if peer is None and selector is not None:
        raise ValueError(
            "recv of an array on a GPU needs src: the transport depends on the sender. Backend 'gloo' takes all arrays "
            "through host memory, from any rank"
        )
    if selector is not None and peer == communicator_of(group).rank:
        raise ValueError("dst or src is this rank: a GPU does not send to itself here, copy the array instead")
    return communicator_of(group) if selector is None else selector.for_p2p(device, peer or 0)


def _selector(group: Group) -> GpuBackendSelector | None:
    """Return the group's selector; None if its arrays on GPUs go through host memory."""
    found = cast(ProcessGroup, require_session().group if group is None else group)
    if found._engines.device == "host":
        return None
    comm = found._communicator
    if comm.gpus is None:
        if found._engines.device == "nccl":
            require_available("nccl")
        comm.gpus = GpuBackendSelector(comm, found._engines.device, shares_gpus(os.environ))
    return cast(GpuBackendSelector, comm.gpus)
