"""Server of attached processes: their streams, which come by a unix socket and through the HTTP port of the agent.

A call is made in the thread of the stream that has brought it. The stream that acquires the agent is the lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Any

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import StreamClosedError, StreamTimeoutError
from rankmesh_agent.net.stream_server import GREETING_SECONDS, StreamServer
from rankmesh_agent.remote.address import listen, socket_path
from rankmesh_agent.remote.calls import REQUESTS
from rankmesh_agent.remote.codec import decode, encode, error_data
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.remote.requests import Acquire, Release
from rankmesh_agent.remote.session import Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Attachment, Kind
from rankmesh_agent.wire.credentials import Credentials, job_digest
from rankmesh_agent.wire.errors import DistError, DistNetworkError, ForbiddenJobError, ProtocolError
from rankmesh_agent.wire.hello import Client, Service

_MAX_STREAMS = 512
"""Authenticated streams at the same time; more are closed at once. Each stream has a thread."""
_MAX_REASON = 500

_log = logging.getLogger("rankmesh")


class SessionServer(StreamServer[AgentStream]):
    """An agent's side of all streams of processes that are attached to it; ``shm_dir`` has the unix socket."""

    attachment_bytes = attach_frames.ATTACHMENT_BYTES

    def __init__(self, leases: LeaseManager, agent_id: str, credentials: Credentials, shm_dir: str) -> None:
        super().__init__(Service.ATTACH, AgentStream, lambda: credentials)
        self._leases = leases
        self._agent_id = agent_id
        self._shm_dir = shm_dir
        self._path = socket_path(shm_dir, agent_id)
        self._places = threading.BoundedSemaphore(_MAX_STREAMS)
        self._sessions: dict[str, Session] = {}
        """By their leases' ids."""

    def listen(self) -> list[socket.socket]:
        """Return the unix socket; none where that is not possible: then processes attach through the port alone."""
        try:
            return [listen(self._shm_dir, self._agent_id)]
        except OSError as error:
            _log.warning("no unix socket at %s, so processes attach over TCP: %s", self._path, error.strerror or error)
            return []

    def close(self) -> None:
        """End all leases and streams. Does nothing the second time."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        super().close()

    def accepted(self, credentials: Credentials, attachment: bytes) -> str:
        return credentials.key_of_job(Attachment.decode(attachment).job)

    def serve(self, stream: AgentStream, client: Client) -> None:
        if not self._places.acquire(blocking=False):
            _log.warning("an attached process was refused: there are %d connections already", _MAX_STREAMS)
            return
        try:
            attachment = Attachment.decode(client.attachment)
            if attachment.lease:
                self._serve_calls(stream, attachment)
            else:
                self._serve_lease(stream, attachment)
        finally:
            self._places.release()

    def _serve_lease(self, stream: AgentStream, attachment: Attachment) -> None:
        request = decode(REQUESTS, stream.receive(Deadline(GREETING_SECONDS)).document)
        if not isinstance(request, Acquire):
            return
        try:
            if attachment.agent != self._agent_id:
                raise DistNetworkError("this is another agent than the one that was offered; ask the gateway again")
            if job_digest(request.terms.job) != attachment.job:
                raise ForbiddenJobError("the credential given is that of another job than the lease's")
            session = Session(self._leases, stream, request.terms)
        except DistError as error:
            stream.send(attach_frames.encode(Kind.ERROR, encode(error_data(error))))
            return
        lease = session.active.lease
        reason = f"its process ({lease.holder}) ended without a goodbye"
        how: dict[str, Any] = {"failed": True}
        self._sessions[lease.id] = session
        session.await_join()
        try:
            release = decode(REQUESTS, stream.receive(None).document)
            if not isinstance(release, Release):
                raise ProtocolError(f"an attached process sent a {type(release).__name__} over its lease's connection")
            reason = release.reason[:_MAX_REASON]
            texts = {"exit_text": release.exit_text[:_MAX_REASON], "place": release.place[:_MAX_REASON]}
            how = {"raised": release.raised, **texts}
        except (StreamClosedError, StreamTimeoutError):
            pass
        finally:
            session.release(reason, **how)
            del self._sessions[lease.id]
        session.respond(Kind.OK)

    def _serve_calls(self, stream: AgentStream, attachment: Attachment) -> None:
        session = self._sessions.get(attachment.lease)
        if session is not None and attachment[:2] == (self._agent_id, job_digest(session.active.lease.job)):
            with session.serving(stream):
                serve_calls(session, stream)


def serve_calls(session: Session, stream: AgentStream) -> None:
    """Execute the requests of a stream until it ends."""
    while True:
        try:
            frame = stream.receive_request()
            try:
                result = decode(REQUESTS, frame.document).execute(session, stream)
                kind, document = Kind.OK, b"" if result is None else encode(result)
            except (StreamClosedError, StreamTimeoutError, ProtocolError):
                raise
            except Exception as error:
                kind, document = Kind.ERROR, encode(error_data(session.ended() or error))
            stream.respond(kind, document)
        except (StreamClosedError, StreamTimeoutError):
            return
        except ProtocolError as error:
            _log.warning("an attached process violates the protocol: %s", error.message)
            return
