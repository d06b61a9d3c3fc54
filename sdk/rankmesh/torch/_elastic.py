"""Rendezvous of torchrun's nodes at a gateway: ``torchrun --rdzv-backend rankmesh --rdzv-endpoint host:8700``."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankmesh._launcher.node_rendezvous import NodeRendezvous, RendezvousError
from rankmesh._stores.commands import CommandStore
from rankmesh._stores.prefix import PrefixStore
from rankmesh.torch._store import Store
from rankmesh_agent.config.launched import unlaunched
from rankmesh_agent.config.launchers import slug
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import url_for
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.fields import MAX_INTEGER
from rankmesh_agent.wire.schemas import NO_NODE, STARTING, LauncherHeartbeat, LauncherReply, LauncherState

_GATEWAY_PORT = 8700
_NO_ID = "none"
"""torchrun's default of ``--rdzv-id``."""
_SLICE = timedelta(seconds=2)
"""Length of one wait for the nodes of an attempt, one of which may be lost meanwhile."""
_STORE_TIMEOUT = timedelta(seconds=60)
"""Of torchrun's calls, as in its own rendezvous."""
_PAUSE_SECONDS = 0.1

_log = logging.getLogger("rankmesh")


class GatewayRendezvous(elastic.RendezvousHandler):
    """A torchrun as the launcher of one node of a job, see docs/launching.md."""

    def __init__(self, params: elastic.RendezvousParameters) -> None:
        settings = Settings.from_env(unlaunched(os.environ))
        self._run_id: str = params.run_id
        self._address = params.local_addr or socket.getfqdn()
        self._join_seconds = params.get_as_int("join_timeout", 600)
        self._url = url_for(*parse_rendezvous_endpoint(params.endpoint, _GATEWAY_PORT))
        self._token = settings.token
        beat = LauncherHeartbeat(
            slug(settings.job if params.run_id == _NO_ID else params.run_id),
            NO_NODE,
            params.max_nodes,
            "",
            STARTING,
            "waiting",
            MAX_INTEGER,  # torchrun counts
            min_nodes=params.min_nodes,
            last_call=params.get_as_int("last_call_timeout", 30),
            torchrun=True,
        )
        self._nodes = NodeRendezvous(beat, self._url, self._token)
        self._store: Store | None = None
        self._server: TCPStore | None = None
        atexit.register(self._end, "stopped")  # torchrun does not shut this down if a signal ends it

    def get_backend(self) -> str:
        return "rankmesh"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """True: the torchrun of node 0 has a TCPStore for the ranks, another one in each attempt."""
        return True

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        while True:
            place = self._join()
            self._server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if not place.node else None
            found = self._meet(place)
            if found is not None:
                return found

    def num_nodes_waiting(self) -> int:
        """Return 1 if nodes have joined, or one is lost, since this node's ranks began: they are to start again."""
        return int(self._nodes.is_outdated)

    def is_closed(self) -> bool:
        return self._nodes.latest.over

    def set_closed(self) -> None:
        self._nodes.report("closed")

    def shutdown(self) -> bool:
        atexit.unregister(self._end)
        self._end("closed")
        return True

    def _end(self, state: LauncherState) -> None:
        self._nodes.report(state)
        self._nodes.settle()
        self._nodes.close()
        self._close_store()

    def _join(self) -> LauncherReply:
        """Wait until the next attempt has its nodes; return this node's place in it."""
        deadline = Deadline(self._join_seconds)
        try:
            place = self._nodes.join(deadline, lambda text: _log.warning("torchrun %s", text))
        except RendezvousError as error:
            kind = elastic.RendezvousTimeoutError if deadline.expired() else elastic.RendezvousConnectionError
            raise kind(str(error)) from None
        if place is not None:
            return place
        latest = self._nodes.latest
        is_spare = latest.nodes > 0 and latest.node == NO_NODE
        kind = elastic.RendezvousGracefulExitError if is_spare else elastic.RendezvousClosedError
        raise kind(f"job {self._run_id!r} at {self._url} is over: {latest.reason}")

    def _meet(self, place: LauncherReply) -> elastic.RendezvousInfo | None:
        """Wait in the job's store for all nodes of an attempt; None if one is lost before, or ends the job."""
        keys = [f"node/{number}" for number in range(place.nodes)]
        deadline = Deadline(self._join_seconds)
        while not self._nodes.is_decided:
            self._close_store()
            job = JobStore(self._url, self._token, self._nodes.latest.store)  # of another gateway, perhaps
            self._store = Store(PrefixStore(f"attempt/{place.attempt}", CommandStore(job, _STORE_TIMEOUT)))
            try:
                port = self._server.port if self._server is not None else 0
                self._store.set(keys[place.node], f"{port} {self._address}")
                self._store.wait(keys, _SLICE)
                first, _, host = self._store.get(keys[0]).decode().partition(" ")
            except DistError as error:
                if deadline.expired():
                    raise elastic.RendezvousConnectionError(str(error)) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return elastic.RendezvousInfo(
                    self._store, place.node, place.nodes, elastic.RendezvousStoreInfo(host, int(first))
                )
        return None

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
