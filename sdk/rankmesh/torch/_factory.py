"""Creation of torch process groups over the mesh; ranks without a session meet at torch's store."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from rankmesh._rendezvous import resolve_init_method
from rankmesh._rendezvous.locator import LOOPBACK
from rankmesh._session import session
from rankmesh._session.backend import Engines
from rankmesh._session.session import Session, communicator_of
from rankmesh.torch._errors import translating
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._hooks import take_over_hooks
from rankmesh.torch._patches import keep_reducer_works
from rankmesh.torch._reconfigure import ReconfigurableGroup
from rankmesh_agent.config import launched
from rankmesh_agent.config.addresses import resolves_to_loopback
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.net.greenlets import refuse_greenlets
from rankmesh_agent.net.host import host_id
from rankmesh_agent.wire.errors import JoinTimeoutError
from rankmesh_agent.wire.ranges import named_ranks

_REMOTE = "elsewhere"
"""Published in place of a host id by a rank that listens beyond loopback."""
_MIN_PAUSE, _MAX_PAUSE = 0.002, 0.05
"""First and longest pause between two checks of torch's store, in seconds."""


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Return a process group for torch.

    The default group joins the job, unless ``rankmesh.init_process_group`` has. A group of ``new_group`` is a group of
    the default group's session. If the default group has another backend, such as gloo, the new group joins a job of
    its own.

    Args:
        options: torch's options: store, group_rank, group_size, timeout, group_id, global_ranks_in_group.
        backend_options: the caller's ``pg_options``; only None is supported.
    """
    if backend_options is not None:
        raise ValueError(f"backend 'rankmesh' takes no pg_options, got {backend_options!r}")
    keep_reducer_works()
    take_over_hooks()
    if getattr(options, "enable_reconfigure", False):  # of torch 2.14
        return ReconfigurableGroup(options, _join)
    return translating(_create, options, list(options.global_ranks_in_group), seconds_of(options.timeout, 0.0))


def new_process_group(store: Any, rank: int, world_size: int, timeout: timedelta | float | None = None) -> ProcessGroup:
    """Return a process group of a job of its own: for libraries that construct groups themselves, such as torchft.

    torch's default group, if there is one, and RankMesh's world stay as they are. ``shutdown()`` leaves the job.

    Args:
        store: a store of torch that all ranks share. Each key of it begins with ``rankmesh/``; groups at one store need
            a ``torch.distributed.PrefixStore`` each, unless all ranks create them in the same order.
        rank: rank of this process in the group.
        world_size: number of ranks.
        timeout: for the join and for each call, a timedelta or seconds; by default RANKMESH_TIMEOUT.

    Raises:
        DistNetworkError: the ranks did not find each other; the subclass and the message name the cause.
        ValueError: rank, size or timeout are out of range; or settings are invalid.
    """
    seconds = seconds_of(timeout, Settings.from_env(os.environ).timeout)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank}")
    keep_reducer_works()
    return _own_session(translating(_join, store, rank, world_size, seconds), store, "")


def _create(options: Any, ranks: list[int], seconds: float) -> ProcessGroup:
    default = c10d.distributed_c10d._get_default_group() if ranks else None
    if isinstance(default, ProcessGroup):
        return _subgroup(default.session, [default.comm.ranks[rank] for rank in ranks], options, seconds)
    world = None if ranks else session.current()
    if world is None:
        world = _join(options.store, options.group_rank, options.group_size, seconds)
        if not ranks:
            session.adopt(world)  # makes rankmesh's own functions work as well
    elif (world.group.rank(), world.group.size()) != (options.group_rank, options.group_size):
        raise ValueError(
            f"torch's group has {options.group_size} ranks, of which this is {options.group_rank}, but this process is "
            f"rank {world.group.rank()} of {world.group.size()} in rankmesh's world; call "
            "rankmesh.destroy_process_group() first"
        )
    elif world.joined_for_store:  # joined for torch's store; from here on torch's group ends it
        world.joined_for_store = False
        communicator_of(world.group).set_timeout(seconds)
    else:
        return _subgroup(world, communicator_of(world.group).ranks, options, seconds)
    return _own_session(world, options.store, str(options.group_id))


def _own_session(world: Session, store: Any, name: str) -> ProcessGroup:
    """Return a process group of all ranks of a session, which it ends."""
    group = ProcessGroup(world.group.rank(), world.group.size(), store, name)
    return group.use(world, world.group, lambda: session.leave(world))


def _subgroup(world: Session, ranks: Any, options: Any, seconds: float) -> ProcessGroup:
    """Return a process group of some of a session's ranks."""
    mesh = world.new_group(ranks, seconds, Engines(), None, "")
    group = ProcessGroup(mesh.rank(), mesh.size(), options.store, str(options.group_id))
    return group.use(world, mesh, lambda: world.drop_group(mesh))


def _join(torch_store: Any, rank: int, size: int, seconds: float) -> Session:
    """Join a job whose ranks exchange addresses through torch's store."""
    refuse_greenlets()
    deadline = Deadline(seconds)
    settings = Settings.from_env(os.environ)
    if settings.hosting == "attached":
        if settings.gateway is None:
            raise ValueError(
                "RANKMESH_HOSTING=attached needs RANKMESH_GATEWAY, the URL of the gateway where standalone agents are: "
                "with torch, MASTER_ADDR and MASTER_PORT are the address of torch's store"
            )
        found = resolve_init_method(settings.gateway, rank, size, settings, timeout=seconds)
        return session.join(found, settings, seconds)
    settings = Settings.from_env(launched.elsewhere(os.environ))
    # All ranks create the same number of groups of one name, so the count separates the keys of each.
    store = c10d.PrefixStore(f"rankmesh/{torch_store.add(f'rankmesh/{rank}', 1)}", torch_store)
    settings = _agree_on_settings(settings, store, rank, size, deadline)
    found = resolve_init_method(None, rank, size, settings, store=store, timeout=deadline.remaining())
    world = session.join(found, settings, deadline.remaining())
    communicator_of(world.group).set_timeout(seconds)  # calls get the whole timeout, not the rest after the join
    return world


def _agree_on_settings(settings: Settings, store: Any, rank: int, size: int, deadline: Deadline) -> Settings:
    """Agree on the address to listen on and the job's token; return the settings with both.

    Ranks that are all on one host listen on loopback, whatever the address of torch's store. Others must be reachable,
    and need a token: if none is set, rank 0 creates one. Every process with access to torch's store can read it there;
    no other process can join.
    """
    # A rank that is configured to listen beyond loopback is reachable from other hosts.
    reachable = settings.bind is not None and not resolves_to_loopback(settings.bind)
    store.set(f"host/{rank}", _REMOTE if reachable else host_id(settings.shm_dir))
    if rank == 0:
        keys = [f"host/{each}" for each in range(size)]
        _wait_for_keys(store, keys, deadline)
        hosts = {bytes(store.get(key)).decode() for key in keys}
        alone = len(hosts) == 1 and _REMOTE not in hosts
        token = settings.token or ("" if alone else secrets.token_hex(32))
        store.set("agreed", json.dumps({"alone": alone, "token": token if token != settings.token else ""}))
    _wait_for_keys(store, ["agreed"], deadline)
    agreed = json.loads(store.get("agreed"))
    return replace(
        settings,
        bind=(settings.bind or LOOPBACK) if agreed["alone"] else settings.bind,
        token=settings.token or agreed["token"],
    )


def _wait_for_keys(store: Any, keys: list[str], deadline: Deadline) -> None:
    """Wait for keys of torch's store.

    This polls, as neither Ctrl-C nor the deadline would interrupt the store's own wait.
    """
    pause = _MIN_PAUSE
    while not store.check(keys):
        if deadline.expired():
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
            raise JoinTimeoutError(
                f"{named_ranks(missing)} did not reach torch's store within {deadline.seconds:.1f} s", ranks=missing
            )
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)
