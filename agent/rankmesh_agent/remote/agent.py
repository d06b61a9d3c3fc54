"""The agent of an attached process: what agent.Agent is to an embedding one, in another process or on another host."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import Frame, FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.address import socket_path
from rankmesh_agent.remote.client import AgentDialer, ConnectionPool, ControlConnection, Note, Views
from rankmesh_agent.remote.codec import GroupDescription, group_from_json
from rankmesh_agent.remote.communicator import RemoteCommunicator
from rankmesh_agent.remote.store import SessionStore
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistBackendError, DistError, DistNetworkError, ProtocolError, RankFailedError
from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS, AgentHeartbeat, Member

_TELL_SECONDS = 5.0
"""How long the agent may take to end a group, or a message."""
_GOODBYE_SECONDS = 10.0
_LEAST_JOIN_SECONDS = 1.0
"""How long the join may take however late it is when an agent is found: the others may all be there."""
_JOIN_GRACE_SECONDS = 75.0
"""How much longer than the join may take its answer may: connecting all pairs comes after it."""


class RemoteAgent:
    """A process's rank in a job, carried by a standalone agent, from the claim to the goodbye.

    Args:
        settings: what the environment says.
        offer: the agent that the gateway offered.
        rank: this process's rank, UNASSIGNED (-1) to be given one; ``member.rank`` says which.
        world_size: ranks in the job.
        timeout: seconds for the join, and the default for calls.
        deadline: when to give up joining.

    Attributes:
        settings: see above.
        member: the rank, as its peers know it: the agent.
        world: the group of all ranks.

    Raises:
        DistNetworkError: the agent cannot be reached.
        AgentTakenError: somebody else has it.
        DistNetworkError: the join failed; the subclass and the message say how.
    """

    def __init__(
        self,
        settings: Settings,
        offer: AgentHeartbeat,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        deadline: Deadline,
    ) -> None:
        self.settings = settings
        self._offer = offer
        same_host = offer.host_id == shared_memory.host_id(settings.shm_dir)
        path = socket_path(settings.shm_dir, offer.id) if same_host else ""
        self._route = AgentDialer(offer, path, settings.token)
        self._lease = secrets.token_hex(16)
        self._reporting = threading.Event()
        self._reporter: threading.Thread | None = None
        self._lanes = ConnectionPool(self._open_lane)
        self._groups: list[RemoteCommunicator] = []
        self._lock = threading.Lock()
        self._left = False
        with contextlib.ExitStack() as undo:
            channel = self._route.connect(deadline)
            undo.callback(channel.close)  # that ends the lease, and the join
            frame = self._claim(channel, rank, world_size, timeout, deadline)
            said = attach_frames.decode_json(frame.document)
            if frame.header.kind != Response.OK:
                raise codec.error_from_json(said)
            undo.callback(self._lanes.close)
            self._line = ControlConnection(channel)
            try:
                self._members = [Member(**member) for member in said["members"]]
                self.member = next(member for member in self._members if member.rank == said["rank"])
                told = group_from_json(said["world"])
            except (KeyError, TypeError, StopIteration) as error:
                raise ProtocolError("the agent's answer to a claim cannot be understood") from error
            self.world = self._made(told, frame.descriptors, max(deadline.remaining(), 1.0))
            undo.pop_all()

    def _claim(self, channel: FramedStream, rank: int, world_size: int, timeout: float, deadline: Deadline) -> Frame:
        claim = {
            "agent": self._offer.id,
            "lease": self._lease,
            "job": self.settings.job,
            "rank": rank,
            "world_size": world_size,
            "timeout": timeout,
            "joining": max(deadline.remaining(), _LEAST_JOIN_SECONDS),
            "holder": f"pid {os.getpid()} on {socket.gethostname()}",
            "shares": self.settings.transport != "tcp" and not shared_memory.unsupported(),
        }
        try:
            channel.send(attach_frames.encode(Request.ACQUIRE, attach_frames.encode_json(claim)))
            limit = Deadline(deadline.remaining() + _JOIN_GRACE_SECONDS)
            return channel.receive(limit, descriptors=True)
        except (StreamClosedError, StreamTimeoutError) as error:
            raise DistNetworkError(f"agent {self._offer.name!r} went as this process joined: {error}") from error

    # Groups

    def new_group(self, ranks: Sequence[int], timeout: float) -> RemoteCommunicator:
        """See Agent.new_group."""
        said = {"ranks": list(ranks), "timeout": timeout}
        try:
            frame = self.request(Request.NEW_GROUP, attach_frames.encode_json(said), timeout, descriptors=True)
        except BaseException as error:
            if not isinstance(error, DistError):  # Ctrl-C, say
                with contextlib.suppress(DistError):
                    self.control(Request.ABORT_PENDING_GROUPS, {"error": codec.error_to_json(error)})
            raise
        return self._made(group_from_json(attach_frames.decode_json(frame.document)), frame.descriptors, timeout)

    def _made(self, told: GroupDescription, descriptors: list[int], timeout: float) -> RemoteCommunicator:
        try:
            group = RemoteCommunicator(self, told, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            group.start(timeout)
        except BaseException:
            self._drop(group)
            raise
        self._groups.append(group)
        if told.segment is not None:
            self.start_reporting()
        return group

    def drop_group(self, group: Communicator) -> None:
        """End a group at this rank."""
        self._groups = [other for other in self._groups if other is not group]
        self._drop(group)

    def _drop(self, group: Communicator) -> None:
        said = attach_frames.encode_json({"group": group.id})
        with contextlib.suppress(DistError):
            self.request(Request.DROP_GROUP, said, _TELL_SECONDS)
        group.close()

    def use_mpi(self, group: Communicator, compares: bool) -> None:
        """Not available: the rank's agent would make the calls of MPI.

        Raises:
            DistBackendError: always.
        """
        raise DistBackendError(
            "backend 'mpi' needs the rank's agent in this process, which makes the calls of MPI: do not attach to a "
            "standalone agent (hosting=embedded)"
        )

    def group_failure(self, group: int) -> DistError | None:
        """Return a group's first failure as the agent knows it; None while it can go on."""
        try:
            frame = self.request(Request.FAILURE, attach_frames.encode_json({"group": group}), 0.0)
        except DistError as error:
            return error
        said = attach_frames.decode_json(frame.document)
        failure = codec.error_from_json(said) if said else None
        return failure if isinstance(failure, DistError) else None

    def host_of(self, rank: int) -> str:
        """Return what is equal for ranks that share memory: the id of the host of the rank's agent."""
        return next(member.host_id for member in self._members if member.rank == rank)

    def blocking_store(self) -> BlockingStore:
        """Return the job's store, by way of the agent; the caller closes it."""
        return SessionStore(self)

    # Telling the agent what it would know if it made the calls

    def start_reporting(self) -> None:
        """Tell the agent every HEARTBEAT_SECONDS what calls this process has made itself."""
        with self._lock:
            if self._reporter is None and not self._left:
                self._reporter = threading.Thread(target=self._report, name="rankmesh-report", daemon=True)
                self._reporter.start()

    def _report(self) -> None:
        while not self._reporting.wait(HEARTBEAT_SECONDS):
            try:
                self._report_now()
            except RankFailedError as error:
                for group in list(self._groups):
                    group.fail(error)
            except DistError:  # whoever calls finds out
                pass

    def _report_now(self) -> None:
        found = [(group.id, group.report()) for group in list(self._groups)]
        news = [(number, told) for number, told in found if told is not None]
        # A loop over shared memory needs its agents so little that it would not notice what they have.
        failures = dict(self.control(Request.REPORT, {"groups": news}).get("failures", ()))
        for group in list(self._groups):
            if group.id in failures:
                failure = codec.error_from_json(failures[group.id])
                if isinstance(failure, DistError):
                    group.fail(failure)

    # Asking

    def request(
        self,
        kind: Request,
        document: bytes,
        seconds: float,
        *,
        up: Views = (),
        down: Views = (),
        flags: int = 0,
        note: Note = None,
        descriptors: bool = False,
        heard: Callable[[BaseException], None] | None = None,
    ) -> Frame:
        """Ask the agent for something over a lane; see Lanes.ask.

        Args:
            kind, document, seconds, up, down, flags, note, descriptors: see there.
            heard: called with the error, if it was the agent that raised it.

        Raises:
            RankFailedError: the agent is gone, or does not answer.
        """
        try:
            frame = self._lanes.request(
                kind, document, seconds, up=up, down=down, flags=flags, note=note, descriptors=descriptors
            )
        except (StreamClosedError, StreamTimeoutError, ProtocolError) as error:
            self._gone(error)
        if frame.header.kind == Response.ERROR:
            refusal = codec.error_from_json(attach_frames.decode_json(frame.document))
            if heard is not None:
                heard(refusal)
            raise refusal
        return frame

    def control(self, kind: Request, said: dict[str, Any]) -> dict[str, Any]:
        """Ask the agent for something over the lease's connection, which is never busy.

        Raises:
            RankFailedError: the agent is gone, or does not answer.
        """
        try:
            return self._line.request(kind, said, _TELL_SECONDS)
        except (StreamClosedError, StreamTimeoutError, ProtocolError) as error:
            self._gone(error)

    def _gone(self, error: Exception) -> NoReturn:
        offer = self._offer
        if self._left:
            raise DistNetworkError("this process has left the job") from error
        how = "does not answer" if isinstance(error, StreamTimeoutError) else "failed"
        raise RankFailedError(
            f"the agent of this rank, {offer.name!r}, which carries {self.member.described()}, {how}: {error}",
            ranks=[self.member.rank],
            address=offer.urls[0] if offer.urls else None,
        ) from error

    def _open_lane(self) -> FramedStream:
        deadline = Deadline(_TELL_SECONDS)
        try:
            lane = self._route.connect(deadline)
        except DistNetworkError as error:
            raise StreamClosedError(error.message) from error
        try:
            lane.send(attach_frames.encode(Request.OPEN_STREAM, attach_frames.encode_json({"lease": self._lease})))
            frame = lane.receive(deadline)
            if frame.header.kind != Response.OK:
                raise StreamClosedError(str(attach_frames.decode_json(frame.document).get("message", "it refuses")))
        except BaseException:
            lane.close()
            raise
        return lane

    # The end

    def close(self, reason: str = "") -> None:
        """Leave the job: the agent says goodbye to the others, and is free again. Does nothing the second time.

        Args:
            reason: why, for the errors of ranks that still wait for this one.
        """
        if self._left:
            return
        with contextlib.suppress(DistError):
            self._report_now()
        with self._lock:
            self._left = True
            reporter = self._reporter
        self._reporting.set()
        if reporter is not None and reporter is not threading.current_thread():
            reporter.join(_TELL_SECONDS)
        for group in self._groups:
            group.state.mark_destroyed()
        with contextlib.suppress(StreamClosedError, StreamTimeoutError, DistError):
            self._line.request(Request.RELEASE, {"reason": reason}, _GOODBYE_SECONDS)
        self._lanes.close()
        for group in self._groups:
            group.close()
        self._groups = []
        self._line.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors, without a word to anyone."""
        self._left = True
        self._lanes.forget()
        self._line.close()
