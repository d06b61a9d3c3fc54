"""torch's ``env://`` over the mesh's store, under ``rankmesh run`` (MASTER_PORT is a gateway's), srun and mpirun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rankmesh._session import session
from rankmesh._session.init import init_process_group
from rankmesh.torch._errors import translating
from rankmesh.torch._store import fresh_job_store
from rankmesh_agent.config.settings import Settings

_NAMES = ("rank", "world_size")


def handles_env() -> bool:
    """Return whether RankMesh handles ``env://``: a gateway or a launcher that torch does not know is configured.

    MASTER_PORT without a gateway belongs to torch.
    """
    settings = Settings.from_env(os.environ)
    if settings.hosting == "attached":
        return False
    return settings.gateway is not None or (settings.launcher is not None and settings.master_port is None)


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Join the job, and yield the mesh's store, this rank and the world size, as torch's handlers do.

    The session becomes that of torch's default group if the group's backend is ``rankmesh``; otherwise it ends with the
    process.

    Args:
        url: ``env://``, with ``rank`` and ``world_size`` if the caller passed them.
        timeout: of the join.

    Raises:
        As rankmesh.init_process_group.
    """
    query = {name: int(values[-1]) for name, values in parse_qs(urlsplit(url).query).items() if name in _NAMES}
    rank, world_size = (query.get(name, -1) for name in _NAMES)
    world = session.current()
    if world is None:
        translating(init_process_group, "mesh", timeout=timeout, rank=rank, world_size=world_size)
        world = session.require_session()
        world.joined_for_store = True
    yield fresh_job_store(), world.group.rank(), world.group.size()
    raise RuntimeError("env:// cannot rendezvous a second time")
