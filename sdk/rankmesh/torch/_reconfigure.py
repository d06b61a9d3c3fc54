"""Process group whose ranks change while it exists: ``init_process_group(enable_reconfigure=True)`` of torch 2.14."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as c10d

from rankmesh._session import session
from rankmesh.torch._device_backend import backend_names
from rankmesh.torch._errors import translating
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._work import CompletedWork
from rankmesh_agent.net.deadline import seconds_of


class ReconfigurableGroup(ProcessGroup):
    """A process group that makes no calls before ``reconfigure``.

    ``join`` joins the job of the ranks that meet at a store; it takes store, rank, number of ranks and seconds.
    """

    supports_reconfigure = True

    def __init__(self, options: Any, join: Callable[[Any, int, int, float], session.Session]) -> None:
        super().__init__(options.group_rank, options.group_size, options.store, str(options.group_id))
        self._rank: int = options.group_rank
        self._size: int = options.group_size
        self._default_timeout: timedelta = options.timeout
        self._join = join
        self._handle = f"rankmesh:{self._rank}:{secrets.token_hex(8)}"
        self._uuids: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if name in ("session", "mesh", "comm"):
            raise RuntimeError(
                "the group makes no calls before reconfigure(): it was made with enable_reconfigure=True"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def getRank(self) -> int:  # noqa: N802  # torch's rank() calls it, too
        """Return this process's rank."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self._size

    def get_reconfigure_handle(self) -> str:
        """Return what stands for this process in the handles of ``reconfigure``."""
        return self._handle

    def reconfigure(self, opts: Any) -> CompletedWork:
        """Replace the ranks of the group: those of the handles meet at torch's store, under the uuid, as a job.

        The ranks before and their groups end at this process once the job has begun; if it does not begin in time, they
        stay, and another uuid may be tried.

        Args:
            opts: torch's ``ReconfigureOptions``: uuid, handles, timeout; hints are ignored.
        """
        if len(set(backend_names(self).values())) > 1:
            raise RuntimeError("reconfigure() changes groups of one backend: this one has multiple backends")
        if opts.uuid in self._uuids:
            raise RuntimeError(f"uuid {opts.uuid} was already used: each reconfigure() needs another one")
        handles = sorted(opts.handles) if isinstance(opts.handles, set) else opts.handles
        if self._handle not in handles:
            raise RuntimeError(f"the handles {handles} lack that of this process, {self._handle!r}")
        self._uuids.add(opts.uuid)
        rank, size, default = handles.index(self._handle), len(handles), self._timeout
        store = c10d.PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        world = translating(self._join, store, rank, size, seconds_of(opts.timeout, default.total_seconds()))
        self.shutdown()
        session.adopt(world)
        self._rank, self._size = rank, size
        self.use(world, world.group, partial(session.leave, world)).set_timeout(default)
        return CompletedWork([])

    @property
    def _timeout(self) -> timedelta:
        return super()._timeout if "comm" in vars(self) else self._default_timeout
