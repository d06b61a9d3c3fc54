"""The gateway that a launcher hosts, to which it reports the exit status of ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rankmesh._launcher.plan import Plan
from rankmesh._launcher.rank import Rank
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.wire.schemas import RankInfo

if TYPE_CHECKING:
    from rankmesh_gateway.server import Gateway
    from rankmesh_gateway.torch_store import TorchStore

_log = logging.getLogger("rankmesh")


class LauncherGateway:
    """A gateway in the launcher's process."""

    def __init__(self, job: Plan, listener: socket.socket) -> None:
        self._job = job
        self._attempt = job.attempt
        self._warned = False
        self._gateway: Gateway | None = None
        self._torch_store: TorchStore | None = None
        self._settings = replace(Settings.from_env(os.environ), token=job.token)
        self._http = HttpServer(listener, "rankmesh-gateway", token=self._settings.credentials)

    def start(self, on_failure: Callable[[], object]) -> None:
        """Start serving, once. ``on_failure`` is called in another thread once ``failure`` gives a reason."""
        if self._gateway is not None:
            return
        from rankmesh_gateway.server import Gateway
        from rankmesh_gateway.torch_store import TorchStore

        settings = self._settings
        self._torch_store = TorchStore(settings, on_default_group=self._warn_of_gloo)
        self._gateway = Gateway(
            self._http,
            settings,
            settings.credentials,
            names=(self._job.options.master_addr,),
            torch_store=self._torch_store,
        )
        self._gateway.start(on_failure)

    def failure(self) -> str:
        """Return why no rank can join the job, '' if they can or have: then the job goes on without a gateway."""
        why = self._http.failure
        if not why or any(info.state != "joining" for info in self.ranks().values()):
            return ""
        return f"the gateway cannot serve the ranks: {why}"

    def end_attempt(self) -> None:
        """Remove what an attempt has left in torch's store. Not later: ranks of other nodes may begin the next one."""
        if self._torch_store is not None:
            self._torch_store.clear()

    def restart(self, attempt: int) -> None:
        """Report to the registry that an attempt begins; ``ranks`` is of this one then."""
        self._attempt = attempt
        if self._gateway is not None:
            self._gateway.registry.restart(self._job.job, attempt)

    def report_exit(self, rank: Rank) -> None:
        """Report to the registry that a rank's process has failed."""
        status = rank.exit_status
        if self._gateway is None or status is None or not status.shell_status:
            return
        how = f"its process ended with {rank.ending}"
        if status.signal == signal.SIGKILL != rank.sent:
            how += ", sent by the kernel when memory runs out, or by kill -9"
        self._gateway.registry.process_exited(self._job.job, rank.number, rank.pid, socket.gethostname(), how)

    def ranks(self) -> dict[int, RankInfo]:
        """Return the ranks of the attempt as the registry knows them, on this node and others."""
        if self._gateway is None:
            return {}
        return {info.member.rank: info for info in self._gateway.registry.attempt_ranks(self._job.job, self._attempt)}

    def all_know_end(self) -> bool:
        """Return whether the launchers of all nodes have received that the job is over."""
        return self._gateway is None or self._gateway.registry.launchers.all_know_end(self._job.job)

    def stop(self) -> None:
        """Close all waiting requests and event streams, then stop serving."""
        if self._gateway is not None:
            self._gateway.close()
        self._http.close()

    def _warn_of_gloo(self) -> None:
        if self._job.options.as_gloo and not self._warned:
            self._warned = True
            _log.warning(
                "--as-gloo has no effect: torch has created its default group with a backend of its own, as it has not "
                "loaded RankMesh at the ranks (TORCH_DEVICE_BACKEND_AUTOLOAD=0, or a Python without rankmesh); unset "
                "the variable, or 'import rankmesh.torch' in the program"
            )
