"""Server of attached processes: accepts their streams, at a unix socket and through the HTTP port of the agent.

Each stream has a thread, which sleeps in a system call most of the time: a call is made in the thread that received
it, without a hand-off. The stream that acquires the agent is the lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

from rankmesh_agent.config.tls import tls_settings
from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import is_exhausted, log_failure, warn_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.handshake import accept
from rankmesh_agent.net.peer_credentials import admit_peer
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.address import listen, socket_path
from rankmesh_agent.remote.call_stream import CallStream
from rankmesh_agent.remote.lease_stream import LeaseStream, refuse
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Attachment, Request, Response
from rankmesh_agent.wire.credentials import Credentials, job_digest, lease_key
from rankmesh_agent.wire.errors import DistNetworkError, ForbiddenJobError, LeaseEndedError
from rankmesh_agent.wire.hello import Service

GREETING_SECONDS = 10.0
"""Time limit for a client to prove that it knows the token, and to send the first frame."""
MAX_STREAMS = 512
"""Authenticated streams at the same time; more are closed at once. Each stream has a thread."""
_STOP_SECONDS = 5.0
_ACCEPT_RETRY_SECONDS = 0.05
_FULL_SECONDS = 0.001

_log = logging.getLogger("rankmesh")


class SessionServer:
    """An agent's side of all streams of processes that are attached to it.

    Args:
        leases: of the agent.
        agent_id: its id, see AgentHeartbeat.
        credentials: of the clients.
        shm_dir: directory of the unix socket.
    """

    def __init__(self, leases: LeaseManager, agent_id: str, credentials: str | Credentials, shm_dir: str) -> None:
        self._leases = leases
        self._agent_id = agent_id
        self._credentials = Credentials.of(credentials)
        self._shm_dir = shm_dir
        self._path = socket_path(shm_dir, agent_id)
        self._tls = tls_settings()
        self._lock = threading.Lock()
        self._limit = ConnectionLimit("attached processes that have sent no credential")
        self._streams: dict[FramedStream, threading.Thread] = {}
        self._authenticated: set[FramedStream] = set()
        self._lease_streams: dict[str, LeaseStream] = {}
        self._closed = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the unix socket; where that is not possible, processes attach through the HTTP port alone."""
        try:
            listener = listen(self._shm_dir, self._agent_id)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("no unix socket at %s, so processes attach over TCP: %s", self._path, reason)
            return
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="rankmesh-attend", daemon=True)
        self._thread.start()

    def handle(self, sock: socket.socket, admission: Admission) -> None:
        """Serve a connection that begins with the PREFACE of the service. From any thread."""
        try:
            break_when_peer_vanishes(sock)
        except OSError:
            admission.end()
            sock.close()
        else:
            self._admit(sock, admission)

    def close(self) -> None:
        """End all leases and streams. Does nothing the second time."""
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            streams = dict(self._streams)
        if listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for stream in streams:
            stream.shutdown()
        for thread in [*streams.values(), *([self._thread] if self._thread is not None else [])]:
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)

    def end_lease(self, lease: str, reason: str) -> None:
        """Close the streams of a lease that has ended: its process learns of it, and why, if it did not end it."""
        held = self._lease_streams.get(lease)
        if held is not None:
            held.end(reason)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            if not self._limit.make_room() and not self._closed:
                time.sleep(_FULL_SECONDS)
                continue
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if is_exhausted(error):
                    warn_exhausted("an attached process waits", error)
                time.sleep(_ACCEPT_RETRY_SECONDS)  # out of descriptors: the connection stays in the backlog
                continue
            try:
                if admit_peer(sock, self._credentials):
                    self._admit(close_in_children(sock), self._limit.admit(sock))
                    continue
            except Exception as error:
                log_failure("an attached process is not served", error)
            sock.close()

    def _admit(self, sock: socket.socket, admission: Admission) -> None:
        try:
            stream = FramedStream(sock)
        except OSError:
            admission.end()
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(stream, admission), name="rankmesh-attached", daemon=True)
        with self._lock:
            if not self._closed:
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no more threads
                    log_failure("an attached process is not served", error)
                else:
                    self._streams[stream] = thread
                    return
        admission.end()
        stream.close()

    def _serve(self, stream: FramedStream, admission: Admission) -> None:
        try:
            size = attach_frames.ATTACHMENT_BYTES
            handshake = accept(stream.sock, Service.ATTACH, self._accepted, size, self._credentials, self._tls)
            attachment = Attachment.decode(stream.greet(handshake, GREETING_SECONDS).attachment)
            admission.end()
            if not self._has_room(stream):
                _log.warning("an attached process was refused: there are %d connections already", MAX_STREAMS)
                return
            frame = stream.receive(Deadline(GREETING_SECONDS))
            if attachment.agent != self._agent_id:
                refuse(
                    stream,
                    DistNetworkError("this is another agent than the one that was offered; ask the gateway again"),
                )
                return
            if frame.header.kind == Request.ACQUIRE and not attachment.lease:
                document = attach_frames.decode_json(frame.document)
                if job_digest(str(document.get("job", ""))) != attachment.job:
                    refuse(stream, ForbiddenJobError("the credential given is that of another job than the lease's"))
                    return
                lease = LeaseStream(self._leases, stream, document)
                self._lease_streams[lease.id] = lease
                try:
                    lease.serve()
                finally:
                    self._lease_streams.pop(lease.id, None)
            elif frame.header.kind == Request.OPEN_STREAM and attachment.lease:
                self._serve_calls(stream, attachment)
        except (StreamClosedError, StreamTimeoutError, DistNetworkError):
            pass  # a port scan, an old version, a wrong token, a client that died: it gets no other response
        except Exception:
            _log.exception("a connection of an attached process had to be closed")
        finally:
            admission.end()
            stream.close()
            with self._lock:
                self._streams.pop(stream, None)
                self._authenticated.discard(stream)

    def _has_room(self, stream: FramedStream) -> bool:
        """Return whether an authenticated stream may stay."""
        with self._lock:
            if len(self._authenticated) >= MAX_STREAMS:
                return False
            self._authenticated.add(stream)
            return True

    def _accepted(self, attachment: bytes) -> str:
        """Return the credential that the client must have: its job's, or its lease's."""
        wanted = Attachment.decode(attachment)
        key = self._credentials.key_of_job(wanted.job)
        return lease_key(key, wanted.lease) if wanted.lease else key

    def _serve_calls(self, stream: FramedStream, wanted: Attachment) -> None:
        held = self._lease_streams.get(wanted.lease)
        session = held.session if held is not None and job_digest(held.job) == wanted.job else None
        if session is None:
            refuse(stream, LeaseEndedError("the lease of the agent has ended"))
            return
        stream.send(attach_frames.encode(Response.OK))
        with session.serving(stream):
            CallStream(session, stream).serve()
