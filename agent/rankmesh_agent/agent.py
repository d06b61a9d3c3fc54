"""One rank's agent: joins the job, owns the connections, the groups and the store, and is asked over HTTP.

Embedded in the training process, the SDK calls it directly, and the agent has an HTTP server of its own. A standalone
agent has the server first, and one of these for as long as it is leased (``standalone``). It starts no thread for the
data plane: one serves HTTP, one sends heartbeats.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rankmesh_agent.backends.segment_setup import SegmentOptions
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.groups import GroupRegistry, kind_of
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.heartbeat import HeartbeatThread
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.connect import connect_all
from rankmesh_agent.progress.disconnects import DisconnectMonitor
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.store.blocking import BlockingMemoryStore, BlockingStore
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.transports.base import Transport
from rankmesh_agent.transports.shm_ring import RingTransport
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import (
    AgentHealth,
    AgentInfo,
    FlightRecord,
    GroupInfo,
    GroupRequest,
    Heartbeat,
    InFlight,
    JoinReply,
    Leave,
    Member,
)
from rankmesh_agent.wire.stats import AgentStats
from rankmesh_agent.wire.version import __version__

ESTABLISH_SECONDS = 60.0
"""How long connecting all pairs may take once everyone has joined."""
_RING_BUDGET = 8 << 20
_RING_MOST, _RING_LEAST = 1 << 19, 1 << 16


class Agent:
    """One rank of a job, from join to goodbye.

    Args:
        settings: what the environment says.
        find_gateway: returns the gateway's URL, None while it is not known.
        rank: this process's rank, UNASSIGNED (-1) to be given one; ``member.rank`` says which.
        world_size: ranks in the job.
        host: address to listen on.
        timeout: seconds for the join, and the default for calls.
        http: the HTTP server that shows the agent, which keeps running when the agent ends. If left out, the agent has
            one of its own.
        joining: when to give up joining; other threads may restart it to end that early. By default ``timeout`` from
            now.
        instance: random name of this process and join; a new one if left out.
        lends: another process will make this rank's collectives where the members share memory; see Sharing.lend.

    Attributes:
        store_server: serves the store's fast path; None where the keys are at another rank.
        member: this rank, as its peers know it.
        mesh: the connections to them.
        world: the group of all ranks.

    Raises:
        DistNetworkError: the join failed; the subclass and the message say how.
    """

    def __init__(
        self,
        settings: Settings,
        find_gateway: Callable[[], str | None],
        *,
        rank: int,
        world_size: int,
        host: str,
        timeout: float,
        http: HttpServer | None = None,
        joining: Deadline | None = None,
        instance: str = "",
        lends: bool = False,
    ) -> None:
        self._lends = lends
        self._settings = settings
        self._world_size = world_size
        self._started = time.monotonic()
        self._groups: dict[int, LocalCommunicator] = {}
        self._made: dict[tuple[tuple[int, ...], str], int] = {}
        self._over_http = GroupRegistry()
        self._starting: list[LocalCommunicator] = []
        self._lock = threading.Lock()
        self._store: AsyncStore | None = None
        self._leaving = False
        with contextlib.ExitStack() as undo:
            self._own_http = None
            if http is None:
                http = self._own_http = HttpServer.bind(settings, host)
                undo.callback(http.close)
            listener = self._transport(shares=settings.transport != "tcp").listen(f"{host}:0")
            undo.callback(listener.close)
            fast_port = listener.address.rpartition(":")[2]
            self.member = Member(
                rank,
                instance or secrets.token_hex(16),
                socket.gethostname(),
                shared_memory.host_id(settings.shm_dir),
                os.getpid(),
                [f"{address}:{fast_port}" for address in http.addresses],
                http.urls[0],
            )
            self._client = GatewayClient(find_gateway, settings.token)
            undo.callback(self._client.close)
            self._joined = self._client.join(settings.job, world_size, self.member, joining or Deadline(timeout))
            undo.callback(self._say_goodbye, "it could not connect to its peers")
            self.member = next(each for each in self._joined.members if each.instance == self.member.instance)
            self._members = {member.rank: member for member in self._joined.members}
            connections = connect_all(
                self.member,
                self._joined.members,
                self._joined.epoch,
                listener,
                self._transport_to,
                Deadline(min(timeout, ESTABLISH_SECONDS)),
            )
            listener.close()
            self.engine = ProgressEngine(
                self.member.rank,
                self._joined.epoch,
                connections,
                eager_limit=settings.eager_bytes,
                oversubscribed=self._crowded(),
            )
            self._recorder = FlightRecorder(settings.flight_recorder)
            undo.callback(self.engine.close, "it could not set up the world group")
            self.world = self._make_group(range(world_size), "world", timeout)
            self.store_server = self._make_store_server(f"rankmesh-store-{http.port}")
            undo.pop_all()
        if self._own_http is not None:
            ways = {} if self.store_server is None else {store_frames.UPGRADE: self.store_server}
            http.start(self._app(http.names), ways, on_demand=True)
        self._vigil = DisconnectMonitor(self.engine)
        self._heart = HeartbeatThread(lambda: self._client.heartbeat(self._heartbeat()), self._vigil)
        self.engine.on_peer_failure = self._heart.wake
        self._heart.start()

    @property
    def settings(self) -> Settings:
        """What the environment said when the job was joined."""
        return self._settings

    @property
    def store(self) -> AsyncStore:
        """The job's store: rank 0 has the keys and values, the others ask it."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    def blocking_store(self) -> BlockingStore:
        """Return the job's store for callers without an event loop; the caller closes it."""
        store = self.store
        if isinstance(store, MemoryStore):
            return BlockingMemoryStore(store.table)
        from rankmesh_agent.store.client import StoreClient
        from rankmesh_agent.store.http_client import HttpStore

        assert isinstance(store, HttpStore)
        return StoreClient(store.url, store.token)

    # Groups

    def new_group(self, ranks: Sequence[int], timeout: float) -> LocalCommunicator:
        """Make a group of these ranks, this one among them; only they need to call.

        Raises:
            DistBackendError: a member did not come, or failed.
        """
        return self._make_group(ranks, "", timeout)

    def members(self) -> list[Member]:
        """Return who the job's ranks are, in their order."""
        return [member for _, member in sorted(self._members.items())]

    def host_of(self, rank: int) -> str:
        """Return what is equal for ranks that share memory: the id of the rank's host."""
        return self._members[rank].host_id

    def drop_group(self, group: Communicator) -> None:
        """End a group at this rank."""
        with self._lock:
            self._groups.pop(group.id, None)
        group.close()

    def abort_pending_groups(self, error: BaseException) -> None:
        """End the groups that are being made, because of an error of whoever wanted them."""
        with self._lock:
            starting = list(self._starting)
        for group in starting:
            group.abort(error)

    def make_group(
        self, wanted: GroupRequest, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]:
        """Make a group that is asked for over HTTP; its members' agents are all asked.

        Args:
            wanted: the group; this rank is in it.
            begun: is given the group before it waits for the members; aborting it ends that.

        Returns:
            The group, and whether it is new: not if this very one, by its instance, was there.

        Raises:
            GroupExistsError: another group has the name.
            DistBackendError: a member did not come, or failed.
        """
        found = self._over_http.begin(wanted, self._known())
        if found is not None:
            return found, False
        group = None
        try:
            timeout = self.world.timeout if wanted.timeout is None else wanted.timeout
            group = self._make_group(wanted.ranks, wanted.name, timeout, kind_of(wanted), begun)
        finally:
            self._over_http.end(wanted, group)
        return group, True

    def delete_group(self, group: LocalCommunicator) -> None:
        """End a group that was made over HTTP, at this rank.

        Raises:
            GroupInUseError: it was not.
        """
        self._over_http.drop(group)
        self.drop_group(group)

    def _make_group(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: float,
        kind: str = "",
        begun: Callable[[LocalCommunicator], None] = lambda group: None,
    ) -> LocalCommunicator:
        members = tuple(ranks)
        counted = members, kind
        with self._lock:
            # Members count groups with the same ranks alike, so they find the same id without asking anyone. Those
            # made over HTTP are counted apart: they come at any time.
            count = self._made[counted] = self._made.get(counted, 0) + 1
        text = f"{self._joined.job}/{self._joined.epoch}/{members}/{count}{f'/{kind}' if kind else ''}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        group = LocalCommunicator(
            self.engine, number, name or f"group-{number:016x}"[:14], members, self._members, timeout, self._recorder
        )
        sharing = SegmentOptions(
            allowed=self._settings.transport != "tcp" and not shared_memory.unsupported(),
            directory=self._settings.shm_dir,
            job=self._settings.job,
            slot_bytes=self._settings.slot_bytes,
            crowded=self._crowded(),
            strict=self._settings.transport == "shm",
            delegated=self._lends and not kind,
        )
        with self._lock:
            self._starting.append(group)
        try:
            begun(group)
            group.start([self._members[rank].host_id for rank in members], sharing, timeout)
        except BaseException:
            with self._lock:
                self._made[counted] -= 1  # the members that try again count alike
            group.close()
            raise
        finally:
            with self._lock:
                self._starting.remove(group)
        with self._lock:
            self._groups[number] = group
        return group

    # What the HTTP face shows

    def health(self) -> AgentHealth:
        """Return whether this rank can do its work."""
        reasons = [f"group {group.name!r}: {group.failure}" for group in self._known() if group.failure is not None]
        return AgentHealth(
            "failing" if reasons else "ok", "rankmesh-agent", self.member.rank, self._world_size, __version__, reasons
        )

    def ready(self) -> bool:
        """Whether this rank takes part in its job: it has joined, is not leaving, and its groups work."""
        return not self._leaving and self.health().status == "ok"

    def info(self) -> AgentInfo:
        """Return who this agent is."""
        return AgentInfo(
            self._joined.job,
            self._joined.epoch,
            self._world_size,
            self.member,
            self._client.url,
            {str(rank): medium for rank, medium in sorted(self.engine.transports().items())},
            time.monotonic() - self._started,
            __version__,
        )

    def groups(self) -> list[GroupInfo]:
        """Return the groups this rank is a member of."""
        return [group.info() for group in self._known()]

    def group(self, name: str) -> LocalCommunicator | None:
        """Return the group of an id (16 hexadecimal digits) or name, None if the rank is in none."""
        return next((group for group in self._known() if name in (group.name, f"{group.id:016x}")), None)

    def in_flight(self, group: str) -> list[InFlight] | None:
        """Return a group's calls and messages that have begun and not ended; None if there is no such group.

        Args:
            group: its name or id.
        """
        return self._recorder.in_flight(group)

    def flight_records(self, group: str | None, last: int | None) -> list[FlightRecord]:
        """Return the latest calls and messages: see Recorder.records."""
        return self._recorder.records(group, last)

    def vitals(self) -> AgentStats:
        """Return what has been counted."""
        store, lost = self._store, dict(self.engine.lost_peers)
        return AgentStats(
            self._recorder.operations(),
            self._client.heartbeat_stats(),
            store.table.vitals() if isinstance(store, MemoryStore) else None,
            dict(Counter(medium for rank, medium in self.engine.transports().items() if rank not in lost)),
            sum(not how.clean for how in lost.values()),
        )

    def _known(self) -> list[LocalCommunicator]:
        with self._lock:
            return list(self._groups.values())

    # The end

    def close(self, reason: str = "", *, failed: bool = False) -> None:
        """Leave the job: groups end, peers and gateway are told, threads stop. Does nothing the second time.

        Args:
            reason: why, for the errors of ranks that still wait for this one.
            failed: whether the process whose rank this is has died: then the others' groups with it end, too.
        """
        if self._leaving:
            return
        self._leaving = True
        self._heart.stop()
        for group in self._known():
            group.close()
        self.engine.close(reason, failed=failed)
        self._say_goodbye(reason)  # before what may take long: peers have seen the connections end
        self._client.close()
        if self._store is not None:
            self._store.cancel_waits()
        if self._own_http is not None:
            self._own_http.close()
        elif self.store_server is not None:
            self.store_server.close()

    async def aclose(self) -> None:
        """Let go of what the HTTP face used, in the event loop that it used it in."""
        if self._store is not None:
            await self._store.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors, without a word to anyone."""
        self._leaving = True
        self._heart.forget()
        self.engine.close_in_child()
        if self._own_http is not None:
            self._own_http.forget()

    def _say_goodbye(self, reason: str) -> None:
        self._client.leave(Leave(self._joined.job, self._joined.epoch, self.member.rank, self.member.instance, reason))

    def _heartbeat(self) -> Heartbeat:
        self.engine.fail_silent_hosts()
        reply: JoinReply = self._joined
        return Heartbeat(
            reply.job, reply.epoch, self._world_size, self.member, self.groups(), self._vigil.failed_peers()
        )

    # Choices

    def _transport_to(self, peer: Member) -> Transport:
        same_host = peer.host_id == self.member.host_id
        if self._settings.transport == "shm" and not same_host:
            raise DistNetworkError(
                f"RANKMESH_TRANSPORT=shm, but {peer.described()} is on another host than {self.member.described()}, or "
                "sees another RANKMESH_SHM_DIR; leave RANKMESH_TRANSPORT out",
                ranks=[peer.rank],
            )
        return self._transport(shares=same_host and self._settings.transport != "tcp")

    def _transport(self, *, shares: bool) -> TcpTransport:
        settings = self._settings
        if not shares:
            return TcpTransport(settings.token)
        return RingTransport(
            settings.token,
            settings.shm_dir,
            settings.job,
            ring_bytes=max(_RING_LEAST, min(_RING_MOST, _RING_BUDGET // (2 * self._world_size))),
            strict=settings.transport == "shm",
        )

    def _crowded(self) -> bool:
        """Whether this host has more ranks than cores for them."""
        local = sum(member.host_id == self.member.host_id for member in self._members.values())
        return local > len(os.sched_getaffinity(0))

    def _make_store_server(self, name: str) -> StoreServer | None:
        """Return what serves the store's fast path, None where the keys are at another rank."""
        if self.member.rank != 0:
            return None
        store = self.store
        assert isinstance(store, MemoryStore)
        return StoreServer(store.table, self._settings.token, name)

    def _make_store(self) -> AsyncStore:
        if self.member.rank == 0:
            return MemoryStore()
        from rankmesh_agent.store.http_client import (
            HttpStore,  # brings httpx, which takes a quarter of a rank's start
        )

        return HttpStore(self._members[0].http, self._settings.token)

    def _app(self, names: Sequence[str]) -> Callable[[], object]:
        def make() -> object:
            from rankmesh_agent.http.app import create_app

            return create_app(self, token=self._settings.token, names=names, max_tensor=self._settings.max_body)

        return make
