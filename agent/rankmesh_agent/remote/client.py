"""Connections of an attached process to its agent: one that is the lease, and a pool for calls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from msgspec import msgpack

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.dial import connect, connect_unix
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.peer_credentials import PeerRefusedError
from rankmesh_agent.net.pool import ConnectionPool, is_closed_early, until_accepted
from rankmesh_agent.net.stream import Frame, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import ErrorData, Joined, decode, encode, error_from
from rankmesh_agent.remote.requests import Acquire, Release, Request
from rankmesh_agent.remote.staging import StagedStream
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Attachment, Kind
from rankmesh_agent.wire.credentials import job_digest, remedy
from rankmesh_agent.wire.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    LeaseEndedError,
    ProtocolError,
    RankFailedError,
)
from rankmesh_agent.wire.hello import Service, client_script, hello
from rankmesh_agent.wire.schemas import AgentHeartbeat, Member

_CONNECT_SECONDS = 5.0
_RESPONSE_GRACE_SECONDS = 10.0
"""Time limit of a response after that of its call: the agent reports a timeout first."""
CONTROL_SECONDS = 5.0
_RELEASE_SECONDS = 10.0
_LAST_RESPONSE_SECONDS = 2.0
"""Time limit of the response with which an agent ends a lease, once it has closed another connection."""
_JOIN_GRACE_SECONDS = 75.0
"""Time limit of the response after that of the join: all pairs connect in between."""

_UNREACHABLE = OSError, ValueError, StreamClosedError, StreamTimeoutError, ProtocolError, PeerRefusedError

_NIL = msgpack.encode(None)
_ERRORS = msgpack.Decoder(ErrorData)
R = TypeVar("R")
Views = Sequence[memoryview]


class AgentDialer:
    """Connects to an agent: through its unix socket on this host, or else the first of its addresses that answers.

    ``path`` is that of the unix socket, '' if the agent is on another host; the token is the job's credential.
    """

    def __init__(self, agent: AgentHeartbeat, path: str, job: str, token: str) -> None:
        self._urls = list(agent.urls)
        self._path = path if path and os.path.exists(path) else ""
        self._token = token
        self._attachment = Attachment(agent.id, job_digest(job))
        self._name = f"agent {agent.name!r} ({agent.host}, pid {agent.pid})"

    def use_lease(self, lease: str) -> None:
        """Have further connections be for the calls of a lease."""
        self._attachment = self._attachment._replace(lease=lease)

    def connect(self, deadline: Deadline) -> StagedStream:
        """Return a stream to the agent, which has accepted this process's credential; errors list each address."""
        return until_accepted(lambda: self._connect_once(deadline), deadline)

    def _connect_once(self, deadline: Deadline) -> StagedStream:
        failures, cause = [], None
        addresses = ([self._path] if self._path else []) + self._urls
        for address in addresses:
            try:
                stream = self._open(address, max(0.1, min(_CONNECT_SECONDS, deadline.remaining())))
            except _UNREACHABLE as error:
                raise_if_exhausted(error, f"cannot connect to {self._name}")
                failures.append(f"{address}: {error}")
                cause = error if is_closed_early(error) else cause
                continue
            if address != self._path and address != self._urls[0]:
                self._urls.remove(address)
                self._urls.insert(0, address)  # the next connection starts with it
            return stream
        tried = "; ".join(failures) or "it has no address"
        raise DistNetworkError(
            f"{self._name} cannot be reached: {tried}. Can this host connect to any of its addresses "
            "(RANKMESH_ADVERTISE and --url, there)?",
            address=addresses[0] if addresses else None,
        ) from cause

    def _open(self, address: str, seconds: float) -> StagedStream:
        sock = connect_unix(address) if address == self._path else connect(address, seconds, self._token)
        try:
            stream = StagedStream(sock)
            refusal = AuthenticationError(f"the agent has another token than this process: {remedy(self._token)}")
            script = client_script(hello(self._token, self._attachment.encode()), refusal)
            stream.greet(Handshake(sock, Service.ATTACH, script, client=True), seconds)
        except BaseException:
            sock.close()
            raise
        return stream


class AgentClient:
    """Requests of an attached process to its agent, under one lease. For several threads.

    Attributes:
        member: this process's rank, as its peers know it; set after the join.
    """

    member: Member
    _control: StagedStream

    def __init__(self, offer: AgentHeartbeat, dialer: AgentDialer) -> None:
        self._offer = offer
        self._dialer = dialer
        self._pool: ConnectionPool[StagedStream] = ConnectionPool(
            lambda: StreamClosedError("this process has left the job")
        )
        self._control_lock = threading.Lock()
        self._ended: LeaseEndedError | None = None
        self.left = False

    def acquire(self, request: Acquire, deadline: Deadline) -> Joined:
        """Lease the agent, and have it join the job until the deadline; see RemoteAgent."""
        stream = self._dialer.connect(deadline)
        try:
            try:
                stream.send(attach_frames.encode(Kind.REQUEST, encode(request)))
                frame = stream.receive(Deadline(deadline.remaining() + _JOIN_GRACE_SECONDS))
            except (StreamClosedError, StreamTimeoutError) as error:
                raise DistNetworkError(f"agent {self._offer.name!r} went as this process joined: {error}") from error
            if frame.header.kind != Kind.OK:
                raise error_in(frame)
            joined = decode(request.results(), frame.document)
        except BaseException:
            stream.close()  # that ends the lease, and the join
            raise
        self._dialer.use_lease(joined.lease)
        self._control = stream
        return joined

    def ask(
        self, request: Request[R], seconds: float = 0.0, *, up: Views = (), down: Views = (), in_place: bool = False
    ) -> R:
        """Send a request, which may take ``seconds``, over a stream of the pool; return its result.

        Args:
            up: arrays that go along.
            down: memory for the arrays that come back, if there are any.
            in_place: whether these are the arrays that went along.

        Raises:
            RankFailedError: the agent is gone, or does not answer.
        """
        pool = self._pool
        try:
            stream = pool.acquire(self._open_stream)
            try:
                stream.send_request(encode(request), up, 0 if in_place else sum(map(len, down)))
                frame = stream.receive(Deadline(seconds + _RESPONSE_GRACE_SECONDS))
                if frame.header.kind == Kind.OK:
                    stream.receive_arrays(frame.header, down, 0 if in_place else sum(map(len, up)))
                stream.end_request(failed=frame.header.kind == Kind.ERROR)
            except BaseException:  # Ctrl-C too: the next bytes of the stream belong to this call
                pool.discard(stream)
                raise
            pool.release(stream)
        except (StreamClosedError, StreamTimeoutError, ProtocolError) as error:
            self._raise_lost(error)
        if frame.header.kind == Kind.ERROR:
            refusal = error_in(frame)
            if isinstance(refusal, LeaseEndedError):
                self._raise_lost(refusal)
            raise refusal
        return decode(request.results(), frame.document or _NIL)

    def failure(self, request: Request[ErrorData | None]) -> DistError | None:
        """Return the failure that a request asks for, None if there is none."""
        try:
            found = self.ask(request)
        except DistError as error:
            return error
        failure = None if found is None else error_from(found)
        return failure if isinstance(failure, DistError) else None

    def release(self, request: Release) -> None:
        """End the lease: the agent leaves the job for this process."""
        with self._control_lock, contextlib.suppress(StreamClosedError, StreamTimeoutError, ProtocolError):
            self._control.send(attach_frames.encode(Kind.REQUEST, encode(request)))
            self._control.receive(Deadline(_RELEASE_SECONDS))
        self._pool.close()

    def close(self) -> None:
        """Close all connections; an agent that is still leased takes it for the end of this process."""
        self._pool.close()
        self._control.close()

    def _raise_lost(self, error: Exception) -> NoReturn:
        offer = self._offer
        if self.left:
            raise DistNetworkError("this process has left the job") from error
        if isinstance(error, LeaseEndedError):
            self._ended = error
        elif isinstance(error, StreamClosedError):
            error = self._last_response() or error
        how = "does not answer" if isinstance(error, StreamTimeoutError) else "failed"
        how = "has ended" if isinstance(error, LeaseEndedError) else how
        address = offer.urls[0] if offer.urls else None
        raise RankFailedError(
            f"the agent of this rank, {offer.name!r} at {address}, which carries {self.member.described()}, {how}: "
            f"{error}",
            ranks=[self.member.rank],
            address=address,
        ) from error

    def _last_response(self) -> LeaseEndedError | None:
        """Return the error with which the agent has ended the lease; None if its connection has brought none."""
        with self._control_lock, contextlib.suppress(StreamClosedError, StreamTimeoutError, ProtocolError):
            while self._ended is None:
                frame = self._control.receive(Deadline(_LAST_RESPONSE_SECONDS))
                if frame.header.kind == Kind.ERROR:
                    error = error_in(frame)
                    self._ended = error if isinstance(error, LeaseEndedError) else None
        return self._ended

    def _open_stream(self) -> StagedStream:
        try:
            return self._dialer.connect(Deadline(CONTROL_SECONDS))
        except DistNetworkError as error:
            raise StreamClosedError(error.message) from error


def error_in(frame: Frame) -> BaseException:
    """Return the error in a response."""
    return error_from(decode(_ERRORS, frame.document))
