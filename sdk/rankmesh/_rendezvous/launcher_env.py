"""Master address and port of processes started by Slurm, MPI or Kubernetes, where the environment lacks them."""

from __future__ import annotations

from dataclasses import replace

from rankmesh._rendezvous.locator import listen_address
from rankmesh_agent.config.addresses import is_loopback, resolves_to_loopback
from rankmesh_agent.config.launchers import Launcher
from rankmesh_agent.config.settings import Settings


def with_master_address(settings: Settings, launcher: Launcher) -> Settings:
    """Return the settings with the address of rank 0's gateway, and the address that this host listens on.

    Values that are set already stay.

    Raises:
        ValueError: the launcher does not define the host of rank 0, its address is unreachable from other hosts, or
            there is no token; the message names the setting.
        DistNetworkError: there is no route to rank 0's host.
    """
    host = settings.master_addr or launcher.host()
    port = launcher.port() if settings.master_port is None else settings.master_port
    if not host:
        raise ValueError(
            f"{launcher.kind.name} started ranks on several hosts, and does not say where rank 0 is: "
            f"{launcher.kind.address}"
        )
    if not (resolves_to_loopback(host) if launcher.one_host else is_loopback(host)):
        settings = _beyond_loopback(settings, launcher, host, port)
    return replace(settings, master_addr=host, master_port=port)


def _beyond_loopback(settings: Settings, launcher: Launcher, host: str, port: int) -> Settings:
    if not settings.token:
        raise ValueError(
            f"{launcher.kind.name} started ranks that meet at {host}, which other machines can reach, so they need a "
            f"token, the same for all: {launcher.kind.token}"
        )
    if settings.bind is not None:
        return settings
    own = "" if settings.interface is not None else launcher.own_address()
    own = own or listen_address(settings, host, port)
    if is_loopback(own) and not launcher.one_host:
        raise ValueError(
            f"{host}, where rank 0 is, stands for {own} on this host (see /etc/hosts), which other hosts cannot reach: "
            "set MASTER_ADDR to an address of rank 0's host that all can reach"
        )
    return replace(settings, bind=own)
