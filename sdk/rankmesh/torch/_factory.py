"""How a torch process group becomes one of the mesh: ranks find each other through the store torch hands over."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import replace
from typing import Any

import torch.distributed as c10d

from rankmesh._rendezvous import rendezvous
from rankmesh._rendezvous.locator import LOOPBACK
from rankmesh._session import session
from rankmesh._session.backend import Engines
from rankmesh._session.session import Session
from rankmesh.torch._errors import to_torch_error
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._reducer import keep_reducer_works
from rankmesh_agent.config.settings import Settings, is_loopback
from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire.errors import DistError, JoinTimeoutError

_ELSEWHERE = "elsewhere"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two looks into torch's store."""


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Return the process group that torch asks for.

    The default group joins the job, unless ``rankmesh.init_process_group`` has. A group made by ``new_group`` is one of
    the default group's mesh; if the default group has another backend, gloo say, it gets a mesh of its own.

    Args:
        options: torch's: store, group_rank, group_size, timeout, group_id, global_ranks_in_group.
        backend_options: what the caller gave as ``pg_options``; None, the mesh has no such options.

    Raises:
        DistNetworkError: the ranks did not find each other; the subclass and the message say how.
        ValueError: ``pg_options`` were given; or settings make no sense.
    """
    if backend_options is not None:
        raise ValueError(f"backend 'rankmesh' takes no pg_options, got {backend_options!r}")
    keep_reducer_works()
    try:
        return _made(options, list(options.global_ranks_in_group), seconds_of(options.timeout, 0.0))
    except DistError as error:
        raise to_torch_error(error) from error.__cause__


def _made(options: Any, ranks: list[int], seconds: float) -> ProcessGroup:
    if ranks:
        default = c10d.distributed_c10d._get_default_group()
        if isinstance(default, ProcessGroup):
            return _part(default.world, [default.mesh._communicator.ranks[rank] for rank in ranks], options, seconds)
        return _whole(_joined(options, seconds), options)
    world = session.current()
    if world is None:
        world = _joined(options, seconds)
        session.adopt(world)  # rankmesh's own functions work beside torch's
        return _whole(world, options)
    size = world.group.size()
    if (world.group.rank(), size) != (options.group_rank, options.group_size):
        raise ValueError(
            f"torch's group has {options.group_size} ranks, of which this is {options.group_rank}, but this process is "
            f"rank {world.group.rank()} of {size} in rankmesh's world; call rankmesh.destroy_process_group() first"
        )
    if world.joined_for_store:  # joined for torch's store: it is torch's group that ends it
        world.joined_for_store = False
        world.group._communicator.set_timeout(seconds)
        return _whole(world, options)
    return _part(world, world.group._communicator.ranks, options, seconds)


def _whole(world: Session, options: Any) -> ProcessGroup:
    """Return a process group that is a world, and ends it."""
    return ProcessGroup(world, world.group, options.store, str(options.group_id), lambda: session.leave(world))


def _part(world: Session, ranks: Any, options: Any, seconds: float) -> ProcessGroup:
    """Return a process group of some of a world's ranks."""
    mesh = world.new_group(ranks, seconds, Engines(), None, "")
    return ProcessGroup(world, mesh, options.store, str(options.group_id), lambda: world.drop_group(mesh))


def _joined(options: Any, seconds: float) -> Session:
    """Join a job whose ranks meet at torch's store."""
    rank, size = options.group_rank, options.group_size
    deadline = Deadline(seconds)
    settings = Settings.from_env(os.environ)
    if settings.hosting == "attached":
        if settings.gateway is None:
            raise ValueError(
                "RANKMESH_HOSTING=attached needs RANKMESH_GATEWAY, the URL of the gateway where standalone agents are: "
                "with torch, MASTER_ADDR and MASTER_PORT are the address of torch's store"
            )
        meeting = rendezvous(settings.gateway, rank, size, settings, timeout=seconds)
        return session.join(meeting, settings, seconds)
    # All make as many groups of one name: what an earlier one left in the store is not found again.
    store = c10d.PrefixStore(f"rankmesh/{options.store.add(f'rankmesh/{rank}', 1)}", options.store)
    settings = _agreed(settings, store, rank, size, deadline)
    meeting = rendezvous(None, rank, size, settings, store=store, timeout=deadline.remaining())
    world = session.join(meeting, settings, deadline.remaining())
    world.group._communicator.set_timeout(seconds)  # for calls all of it, not what joining has left
    return world


def _agreed(settings: Settings, store: Any, rank: int, size: int, deadline: Deadline) -> Settings:
    """Return where to listen and the job's token, as all ranks do.

    Ranks that are all on one host listen on loopback, whatever the address of torch's store. Others have to be reached
    from elsewhere, and need a token: if none is set, rank 0 makes one. Whoever can read torch's store can read it
    there, but nobody else can take part.
    """
    # Who is told to listen elsewhere than on loopback can be reached from elsewhere.
    told = settings.interface is not None if settings.bind is None else not is_loopback(settings.bind)
    store.set(f"host/{rank}", _ELSEWHERE if told else shared_memory.host_id(settings.shm_dir))
    if rank == 0:
        keys = [f"host/{each}" for each in range(size)]
        _await(store, keys, deadline)
        hosts = {bytes(store.get(key)).decode() for key in keys}
        alone = len(hosts) == 1 and _ELSEWHERE not in hosts
        token = settings.token or ("" if alone else secrets.token_hex(32))
        store.set("agreed", json.dumps({"alone": alone, "token": token if token != settings.token else ""}))
    _await(store, ["agreed"], deadline)
    agreed = json.loads(store.get("agreed"))
    return replace(
        settings,
        bind=(settings.bind or LOOPBACK) if agreed["alone"] else settings.bind,
        token=settings.token or agreed["token"],
    )


def _await(store: Any, keys: list[str], deadline: Deadline) -> None:
    """Wait for keys of torch's store.

    It is asked again and again: in a store's own wait neither Ctrl-C nor this deadline would get through.

    Raises:
        JoinTimeoutError: they do not come; names the ranks whose they are.
    """
    pause = _SHORTEST_PAUSE
    while not store.check(keys):
        if deadline.expired():
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
            raise JoinTimeoutError(
                f"ranks {missing} did not come to torch's store within {deadline.seconds:.1f} s", ranks=missing
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
