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

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import is_exhausted, warn_exhausted
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.address import listen, socket_path
from rankmesh_agent.remote.call_stream import CallStream
from rankmesh_agent.remote.lease_stream import LeaseStream, refuse
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistNetworkError, LeaseEndedError

CHALLENGE_SECONDS = 10.0
"""Time limit for a client to prove that it knows the token, and to send the first frame."""
MAX_STREAMS = 512
"""Streams at the same time, each with a thread; more are closed at once."""
_STOP_SECONDS = 5.0
_ACCEPT_RETRY_SECONDS = 0.05

_log = logging.getLogger("rankmesh")


class SessionServer:
    """An agent's side of all streams of processes that are attached to it.

    Args:
        leases: of the agent.
        agent_id: its id, see AgentHeartbeat.
        token: the job's token.
        shm_dir: directory of the unix socket.
    """

    def __init__(self, leases: LeaseManager, agent_id: str, token: str, shm_dir: str) -> None:
        self._leases = leases
        self._agent_id = agent_id
        self._token = token
        self._shm_dir = shm_dir
        self._path = socket_path(shm_dir, agent_id)
        self._lock = threading.Lock()
        self._streams: dict[FramedStream, threading.Thread] = {}
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

    def handle(self, sock: socket.socket) -> None:
        """Serve a connection whose client has requested the upgrade over HTTP. From any thread."""
        try:
            sock.settimeout(CHALLENGE_SECONDS)
            break_when_peer_vanishes(sock)
            sock.sendall(attach_frames.UPGRADE.response())
        except OSError:
            sock.close()
            return
        self._admit(sock)

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

    def end_lease(self, lease: str) -> None:
        """Close the streams of a lease that has ended: its process learns of it, if it did not end it."""
        held = self._lease_streams.get(lease)
        if held is not None:
            held.end()

    def close_in_child(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for stream in list(self._streams):
            stream.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if is_exhausted(error):
                    warn_exhausted("an attached process waits", error)
                time.sleep(_ACCEPT_RETRY_SECONDS)  # out of descriptors: the connection stays in the backlog
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            stream = FramedStream(sock)
        except OSError:
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(stream,), name="rankmesh-attached", daemon=True)
        with self._lock:
            full = len(self._streams) >= MAX_STREAMS
            if not self._closed and not full:
                self._streams[stream] = thread
                thread.start()
                return
        if full:
            _log.warning("an attached process was refused: there are %d connections already", MAX_STREAMS)
        stream.close()

    def _serve(self, stream: FramedStream) -> None:
        try:
            stream.authenticate(self._token, CHALLENGE_SECONDS)
            frame = stream.receive(Deadline(CHALLENGE_SECONDS))
            document = attach_frames.decode_json(frame.document)
            if frame.header.kind == Request.ACQUIRE:
                lease = LeaseStream(self._leases, self._agent_id, stream, document)
                self._lease_streams[lease.id] = lease
                try:
                    lease.serve()
                finally:
                    self._lease_streams.pop(lease.id, None)
            elif frame.header.kind == Request.OPEN_STREAM:
                self._serve_calls(stream, str(document.get("lease", "")))
        except (StreamClosedError, StreamTimeoutError, DistNetworkError):
            pass  # a port scan, an old version, a wrong token, a client that died: it gets no other response
        except Exception:
            _log.exception("a connection of an attached process had to be closed")
        finally:
            stream.close()
            with self._lock:
                self._streams.pop(stream, None)

    def _serve_calls(self, stream: FramedStream, lease: str) -> None:
        held = self._lease_streams.get(lease)
        session = None if held is None else held.session
        if session is None:
            refuse(stream, LeaseEndedError("the lease of the agent has ended"))
            return
        stream.send(attach_frames.encode(Response.OK))
        with session.serving(stream):
            CallStream(session, stream).serve()
