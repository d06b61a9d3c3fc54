"""Rendezvous under MPI: ranks come from MPI, which also broadcasts the address of rank 0's gateway."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh._rendezvous.locator import LOOPBACK, GatewayLocator, KnownGateway, listen_address
from rankmesh._rendezvous.methods import Rendezvous, rendezvous_through, resolve_init_method
from rankmesh._rendezvous.tcp import TcpLocator
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.net.host import host_id
from rankmesh_agent.wire.errors import DistError, DistNetworkError, from_code

_ANY_PORT = 9
"""Port of an address whose route is looked up, but which is not connected to."""


class _RankInfo(NamedTuple):
    """The contribution of a rank to the exchange of all ranks."""

    host: str
    name: str
    configured: bool
    problem: str


def mpi_rendezvous(
    init_method: str | None, rank: int, world_size: int, settings: Settings, **options: Any
) -> tuple[Rendezvous, Settings]:
    """Return the parameters of the join and the settings for it; collective over MPI's world.

    Without an init method, a store, MASTER_ADDR and MASTER_PORT, or RANKMESH_GATEWAY, rank 0 hosts the gateway on any
    free port, on loopback if all ranks share a host, and MPI broadcasts its address and the token. Ranks on several
    hosts need a token; rank 0 generates one unless it is configured there. Rank and world size are MPI's.
    """
    comm = mpi().COMM_WORLD
    configured = (
        init_method is not None
        or options.get("store") is not None
        or settings.gateway is not None
        or (settings.master_addr is not None and settings.master_port is not None)
    )
    problem = _contradiction(rank, world_size, settings, comm.rank, comm.size)
    own = host_id(settings.shm_dir), mpi().Get_processor_name(), configured, problem
    ranks = [_RankInfo(*each) for each in comm.allgather(own)]
    for number, each in enumerate(ranks):
        if each.problem:
            raise ValueError(each.problem if each.problem == problem else f"rank {number}: {each.problem}")
    if len({each.configured for each in ranks}) > 1:
        ours = [number for number, each in enumerate(ranks) if each.configured]
        raise ValueError(
            f"only ranks {ours} define the rendezvous (init_method, store, or MASTER_ADDR and MASTER_PORT);"
            " all ranks must, or none"
        )
    if configured:
        found = resolve_init_method(init_method, comm.rank, comm.size, settings, **options)
        return found._replace(hosting=found.hosting or "embedded"), settings
    fresh = secrets.token_hex(32) if len({each.host for each in ranks}) > 1 else ""
    settings = replace(settings, token=comm.bcast(settings.token or fresh))
    locator = _shared_locator(comm, settings, ranks)
    return rendezvous_through(locator, comm.rank, comm.size, "embedded"), settings


def _contradiction(rank: int, world_size: int, settings: Settings, own: int, size: int) -> str:
    """Return the error in the given rank and world size, '' if there is none."""
    if settings.hosting == "attached":
        return (
            "backend 'mpi' needs the rank's agent in this process, which makes the calls of MPI: leave out "
            "RANKMESH_HOSTING=attached"
        )
    if size == 1:
        wanted = world_size if world_size != -1 else settings.world_size or 1
        if wanted > 1:
            return (
                f"world_size is {wanted}, but MPI has this process alone: start all ranks together, with "
                f"mpirun -n {wanted} python script.py"
            )
    for name, given, true in (("rank", rank, own), ("world_size", world_size, size)):
        if given not in (-1, true):
            return f"{name}={given}, but under backend 'mpi' it is MPI's, {true}: leave it out"
    return ""


def _shared_locator(comm: Any, settings: Settings, ranks: list[_RankInfo]) -> GatewayLocator:
    """Host the gateway at rank 0 and broadcast its address."""
    if comm.rank:
        url, failure = comm.bcast(None)
        if failure is not None:
            code, message = failure
            raise from_code(code, message) if code else ValueError(message)
        place = urlsplit(url)
        return KnownGateway(url, str(place.hostname), int(place.port or 0), settings)
    try:
        locator = TcpLocator(_gateway_host(settings, ranks), 0, 0, settings)
    except (DistError, ValueError) as error:
        comm.bcast((None, (getattr(error, "code", ""), f"rank 0 cannot host the gateway: {error}")))
        raise
    comm.bcast((locator.find(), None))
    return locator


def _gateway_host(settings: Settings, ranks: list[_RankInfo]) -> str:
    """Return the host for rank 0's gateway, which all other ranks can reach."""
    if settings.bind is not None:
        return settings.bind
    away = next((each.name for each in ranks if each.host != ranks[0].host), None)
    if away is None:
        return LOOPBACK
    try:
        return listen_address(settings, away, _ANY_PORT)
    except DistNetworkError:
        if settings.interface is not None:
            raise
        return ranks[0].name  # MPI's name of a host need not be resolvable
