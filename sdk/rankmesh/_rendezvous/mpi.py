"""Under MPI nobody has to say anything: MPI knows the ranks, and tells everyone where rank 0 hosts the gateway."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh._rendezvous.locator import LOOPBACK, Known, Meeting, chosen_host
from rankmesh._rendezvous.methods import Rendezvous, at, rendezvous
from rankmesh._rendezvous.tcp import AtAddress
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.net.sockets import address_towards
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire.errors import DistError, DistNetworkError, from_code

_ANY_PORT = 9
"""Of an address that is only to be faced, not reached."""


class _Said(NamedTuple):
    """What each rank tells the others.

    Attributes:
        host: what is equal for ranks of one host.
        name: the host's name.
        own_way: whether the program, or the environment, says how the ranks find each other.
        why: what is wrong at this rank.
    """

    host: str
    name: str
    own_way: bool
    why: str


def among_mpi(
    init_method: str | None, rank: int, world_size: int, settings: Settings, **options: Any
) -> tuple[Rendezvous, Settings]:
    """Return where to join, and the settings to do so with; a collective call of all ranks of MPI's world.

    Where neither an init method, nor a store, nor MASTER_ADDR and MASTER_PORT or RANKMESH_GATEWAY say how the ranks
    find each other, rank 0 hosts the gateway on any free port, on loopback if all ranks are on one host, and MPI tells
    the others. So it does with the token; ranks on several hosts need one, and rank 0 makes it unless one is set there.

    Args:
        init_method, rank, world_size, settings, options: as for ``rendezvous``; rank and world size are MPI's, and
            what is said here must be the same.

    Raises:
        ValueError: rank or world size are not MPI's, the ranks do not agree on how they find each other, or one is to
            attach to a standalone agent.
        As rendezvous.
    """
    comm = mpi().COMM_WORLD
    own_way = (
        init_method is not None
        or options.get("store") is not None
        or settings.gateway is not None
        or (settings.master_addr is not None and settings.master_port is not None)
    )
    why = _contradiction(rank, world_size, settings, comm.rank, comm.size)
    said = [
        _Said(*each)
        for each in comm.allgather((shared_memory.host_id(settings.shm_dir), mpi().Get_processor_name(), own_way, why))
    ]
    for number, each in enumerate(said):
        if each.why:
            raise ValueError(each.why if each.why == why else f"rank {number}: {each.why}")
    if len({each.own_way for each in said}) > 1:
        ours = [number for number, each in enumerate(said) if each.own_way]
        raise ValueError(
            f"only ranks {ours} say how the ranks find each other (init_method, store, or MASTER_ADDR and MASTER_PORT);"
            " let all say so, or none"
        )
    if own_way:
        found = rendezvous(init_method, comm.rank, comm.size, settings, **options)
        return found._replace(hosting=found.hosting or "embedded"), settings
    fresh = secrets.token_hex(32) if len({each.host for each in said}) > 1 else ""
    settings = replace(settings, token=comm.bcast(settings.token or fresh))
    meeting = _told(comm, settings, said)
    return at(meeting, comm.rank, comm.size, "embedded"), settings


def _contradiction(rank: int, world_size: int, settings: Settings, own: int, size: int) -> str:
    """Return what is wrong with what is said of the rank and the world size, '' if nothing is."""
    if settings.hosting == "attached":
        return (
            "backend 'mpi' needs the rank's agent in this process, which makes the calls of MPI: leave out "
            "RANKMESH_HOSTING=attached"
        )
    if size == 1:
        wanted = world_size if world_size != -1 else settings.world_size or 1
        if wanted > 1:
            return (
                f"world_size is {wanted}, but MPI knows of this process alone: start all ranks together, with "
                f"mpirun -n {wanted} python script.py"
            )
    for name, given, true in (("rank", rank, own), ("world_size", world_size, size)):
        if given not in (-1, true):
            return f"{name}={given}, but under backend 'mpi' it is MPI's, {true}: leave it out"
    return ""


def _told(comm: Any, settings: Settings, said: list[_Said]) -> Meeting:
    """Host the gateway at rank 0 and tell the others where it is.

    Raises:
        DistError, ValueError: rank 0 cannot; at all ranks.
    """
    if comm.rank:
        url, failure = comm.bcast(None)
        _raise(failure)
        place = urlsplit(url)
        return Known(url, str(place.hostname), int(place.port or 0), settings)
    try:
        meeting = AtAddress(_host(settings, said), 0, 0, settings)
    except (DistError, ValueError) as error:
        comm.bcast((None, (getattr(error, "code", ""), f"rank 0 cannot host the gateway: {error}")))
        raise
    comm.bcast((meeting.find(), None))
    return meeting


def _host(settings: Settings, said: list[_Said]) -> str:
    """Return where rank 0 hosts the gateway: where all others can reach it."""
    chosen = chosen_host(settings)
    if chosen is not None:
        return chosen
    away = next((each.name for each in said if each.host != said[0].host), None)
    if away is None:
        return LOOPBACK
    try:
        return address_towards(away, _ANY_PORT)
    except DistNetworkError:
        return said[0].name  # MPI's name of a host need not be one that can be looked up


def _raise(failure: tuple[str, str] | None) -> None:
    if failure is not None:
        code, message = failure
        raise from_code(code, message) if code else ValueError(message)
