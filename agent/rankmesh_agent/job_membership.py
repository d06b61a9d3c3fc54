"""Membership of one rank in a job, from the join at the gateway and the connections to its neighbours to the leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from rankmesh_agent.config.launchers import ancestors
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.heartbeats import HeartbeatThread, RankHeartbeats
from rankmesh_agent.membership.join import all_members, check_settings, join
from rankmesh_agent.net import descriptors
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.host import host_id
from rankmesh_agent.progress.connector import Connector
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.transports.selection import transport_between
from rankmesh_agent.wire.errors import DistBackendError, GatewayUnreachableError, RankFailedError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.overlay import neighbours
from rankmesh_agent.wire.schemas import (
    GroupInfo,
    GrowingWorld,
    Heartbeat,
    JoinRequest,
    Leave,
    LostRank,
    Member,
    ResourceUsage,
)

_CONNECT_SECONDS = 60.0
"""Time limit for connecting the neighbours after all ranks have joined."""
MIN_SETUP_SECONDS = 5.0
"""Least time for the set-up of a larger world, however late its ranks have come."""
_MAX_UNKNOWN = 3
"""Answers of the gateway, a second apart, that do not have a rank, after which the rank has left."""
_MAX_ANCESTORS = 16
_MAX_REASON = 900


@dataclass
class JoinTerms:
    """Parameters of a process's join.

    Attributes:
        rank: its rank, UNASSIGNED (-1) to have one assigned.
        world_size: ranks in the job; does not matter for a process that awaits the growth of its world.
        timeout: seconds for the join, and the default for calls.
        growth: the world that grows, if this process is a rank of it.
        check: called now and then during the join; raises if that has no point any more.
        check_store: called with the id of the job's store; raises if that is another than the rank has used.
    """

    rank: int
    world_size: int
    timeout: float
    deadline: Deadline
    awaits_growth: bool = False
    growth: GrowingWorld | None = None
    check: Callable[[], None] | None = None
    check_store: Callable[[str], None] = lambda store: None


class JobMembership:
    """One rank's membership in a job; made, it has joined, and is connected to its neighbours.

    Args:
        find_gateway: returns the gateway's URL, None while it is not known.
        terms: how this process joins; ``member.rank`` has its rank.

    Attributes:
        grown: whether the world is an earlier one that has grown.
        members: all ranks, by rank; of most ranks of a large world, host and process alone.
        heartbeats: sends them without groups, until the agent takes over.
        oversubscribed: whether this host has more ranks than cores.

    Raises:
        DistNetworkError: the join failed; the subclass and the message have the cause.
    """

    def __init__(
        self, settings: Settings, find_gateway: Callable[[], str | None], terms: JoinTerms, host: str, http: HttpServer
    ) -> None:
        deadline, connect_seconds = terms.deadline, terms.timeout
        self._gateway_lock = threading.Lock()  # its client is for one thread at a time
        self._left = False
        self._say_goodbye: Callable[[Goodbye], object] = lambda goodbye: None  # no peer is connected yet
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            member = self.member = Member(
                terms.rank,
                secrets.token_hex(16),
                socket.gethostname(),
                host_id(settings.shm_dir),
                os.getpid(),
                [],
                http.urls[0],
                settings.eager_bytes,
                settings.transport,
                settings.full_mesh,
            )
            listener = transport_between(settings, member, member, terms.world_size).listen(f"{host}:0")
            self._closing.callback(listener.close)
            port = listener.address.rpartition(":")[2]
            member.addresses = [f"{address}:{port}" for address in http.addresses]
            self.gateway = GatewayClient(find_gateway, settings.job_token)
            self._closing.callback(self.gateway.close)
            request = JoinRequest(
                settings.job,
                terms.world_size,
                self.member,
                attempt=settings.attempt,
                awaits_growth=terms.awaits_growth,
                growth=terms.growth,
                parent=settings.parent,
                ancestors=list(islice(ancestors(), _MAX_ANCESTORS)) if settings.parent else [],
            )
            joined = join(self.gateway, request, deadline, settings, terms.check)
            self.beats = RankHeartbeats(self.gateway, joined.interval)
            self.name, self.epoch, self.world_size = joined.job, joined.epoch, joined.world_size
            self.store, self.grown = joined.store, joined.grown
            if joined.grown:
                connect_seconds = max(deadline.remaining(), MIN_SETUP_SECONDS)
            # Before the connections are closed: it says goodbye over them.
            undo.push(self.leaving_after("it could not connect to its peers"))
            self.heartbeats = HeartbeatThread(lambda: self.send_heartbeat([], [], watches_peers=False))
            undo.callback(self.heartbeats.stop)
            self.members = all_members(joined)
            self.member = next(member for member in joined.members if member.instance == self.member.instance)
            self.heartbeats.start()  # connections and the world group may take longer than FAILED_SECONDS
            local = sum(member.host_id == self.member.host_id for member in self.members.values())
            self.oversubscribed = local > len(os.sched_getaffinity(0))
            check_settings(list(self.members.values()))
            self.engine = ProgressEngine(
                self.member.rank,
                self.epoch,
                self.world_size,
                eager_limit=settings.eager_bytes,
                oversubscribed=self.oversubscribed,
            )
            self._closing.callback(self.engine.close)
            self._say_goodbye = self.engine.say_goodbye
            self._unknown: dict[int, int] = {}
            connector = Connector(
                self.member,
                self.members.values(),
                joined.epoch,
                listener,
                lambda peer: transport_between(settings, self.member, peer, self.world_size),
                self,
            )
            self._closing.callback(connector.close)
            connector.connect(
                self.engine,
                neighbours(self.member.rank, self.world_size, settings.full_mesh),
                Deadline(min(connect_seconds, _CONNECT_SECONDS)),
            )
            undo.pop_all()

    def send_heartbeat(
        self,
        groups: list[GroupInfo],
        lost: list[LostRank],
        *,
        watches_peers: bool = True,
        usage: ResourceUsage | None = None,
    ) -> DistBackendError | None:
        """Report this rank's groups and the peers that it has lost, if that is due; see RankHeartbeats.send."""
        beat = Heartbeat(self.name, self.epoch, self.world_size, self.member, groups, lost, watches_peers, usage=usage)
        with self._gateway_lock:
            return self.beats.send(beat) if not self._left and self.beats.is_due(lost) else None

    def num_waiting(self, deadline: Deadline) -> int:
        """Return how many processes wait for the job's world to grow; see GatewayClient."""
        with self.gateway.sibling() as client:  # heartbeats do not wait for this request
            return client.num_waiting(self.name, deadline)

    def raise_if_left(self) -> bool:
        """Raise if a rank has left during the join; see GatewayClient."""
        with self._gateway_lock:
            return self.gateway.raise_if_left(self.name, self.epoch)

    def ended(self, unreached: Collection[int] = ()) -> dict[int, Goodbye]:
        """Return the ranks that have ended by the gateway's word, and how; none if it does not answer.

        A gateway that was started meanwhile knows live ranks only: unreached ranks that it does not know have ended.
        """
        with self.gateway.sibling() as client:  # heartbeats do not wait for this request
            found = client.ended_ranks(self.name, self.epoch) or ()
        ended = {info.member.rank: Goodbye(info.reason, died=info.state != "left") for info in found}
        unknown, own = set(unreached) - ended.keys(), self.member.rank
        known: set[int] = set()
        if unknown:
            with contextlib.suppress(GatewayUnreachableError):
                known = {member.rank for member in self.find_members([own, *unknown])}
        if own in known:  # the gateway has had heartbeats of this epoch
            self._unknown = {rank: self._unknown.get(rank, 0) + 1 for rank in unknown - known}
        return ended | {
            rank: Goodbye("the gateway does not know it any more")
            for rank, answers in self._unknown.items()
            if answers >= _MAX_UNKNOWN
        }

    def find_members(self, ranks: Collection[int]) -> list[Member]:
        """Return members with their addresses; raises GatewayUnreachableError if the gateway does not answer."""
        with self.gateway.sibling() as client:
            return client.members(self.name, self.epoch, ranks)

    def leave(self, reason: str, goodbye: Goodbye, failed_ranks: Sequence[int] = ()) -> None:
        """Say goodbye to the peers, and give the gateway the failure that is the reason, and the ranks that it names.

        Does nothing the second time. With peers or a gateway that do not answer, it takes some seconds.
        """
        if self._left:
            return
        self._left = True  # first: a heartbeat that came later would report peers that close their end now as lost
        self._say_goodbye(goodbye)
        member = self.member
        with self._gateway_lock:
            self.gateway.leave(Leave(self.name, self.epoch, member.rank, member.instance, reason, list(failed_ranks)))

    def close(self) -> None:
        """Close the connections, after ``leave``."""
        self._closing.close()

    def leaving_after(self, step: str) -> Callable[[object, BaseException | None, object], None]:
        """Return the exit of a block that leaves the job after an error of a step before the world group is made."""

        def leave(kind: object, error: BaseException | None, traceback: object) -> None:
            if error is None:
                return
            why = descriptors.reason(error) if descriptors.is_exhausted(error) else f"{type(error).__name__}: {error}"
            failure = error if isinstance(error, RankFailedError) else None
            goodbye = Goodbye(f"{step}: {why}"[:_MAX_REASON], raised=True, failure=failure)
            failed_ranks = () if failure is None else [rank for rank in failure.ranks if rank != self.member.rank]
            self.leave(goodbye.reason, goodbye, failed_ranks)

        return leave
