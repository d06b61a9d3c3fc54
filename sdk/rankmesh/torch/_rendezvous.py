"""torch's ``env://`` under ``rankmesh run``, whose MASTER_PORT is a gateway's, and under srun or mpirun, without any.

torch's store is the mesh's then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rankmesh._session import session
from rankmesh._session.init import init_process_group
from rankmesh.torch._errors import to_torch_error
from rankmesh.torch._store import fresh_job_store
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistError

_NAMES = ("rank", "world_size")


def handles_env() -> bool:
    """Whether ``env://`` is ours: somebody says where a gateway is, or a launcher whose variables torch does not know.

    MASTER_PORT without a gateway is torch's: the user sets what torch wants.
    """
    settings = Settings.from_env(os.environ)
    if settings.hosting == "attached":
        return False
    return settings.gateway is not None or (settings.launcher is not None and settings.master_port is None)


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Join the job, and yield the mesh's store, this process's rank and the world size, as torch's handlers do.

    The world that is joined becomes that of torch's default group, if this one's backend is the mesh; else it is left
    when the process ends.

    Args:
        url: ``env://``, with ``rank`` and ``world_size`` if the user passed them.
        timeout: how long the join may take.

    Raises:
        As rankmesh.init_process_group.
    """
    said = {name: int(values[-1]) for name, values in parse_qs(urlsplit(url).query).items() if name in _NAMES}
    rank, world_size = (said.get(name, -1) for name in _NAMES)
    world = session.current()
    if world is None:
        try:
            init_process_group("mesh", timeout=timeout, rank=rank, world_size=world_size)
        except DistError as error:
            raise to_torch_error(error) from error.__cause__
        world = session.require_session()
        world.joined_for_store = True
    yield fresh_job_store(), world.group.rank(), world.group.size()
    raise RuntimeError("env:// cannot be met at a second time")
