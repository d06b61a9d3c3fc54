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
from collections.abc import Callable, Sequence
from typing import Any

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.stream import Frame, FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.address import listen, socket_path
from rankmesh_agent.remote.call_stream import CallStream
from rankmesh_agent.remote.codec import describe_group, error_to_json
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.remote.session import Session
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError, DistNetworkError, LeaseEndedError, ProtocolError
from rankmesh_agent.wire.schemas import LeaseTerms

CHALLENGE_SECONDS = 10.0
"""Time limit for a client to prove that it knows the token, and to send the first frame."""
MAX_STREAMS = 512
"""Streams at the same time, each with a thread; more are closed at once."""
_STOP_SECONDS = 5.0
_RELEASE_RETRY_SECONDS = 0.5
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
        self._sessions: dict[str, Session] = {}
        self._lease_streams: dict[str, _LeaseStream] = {}
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
        self.close_session(lease)
        with self._lock:
            held = self._lease_streams.get(lease)
        if held is not None:
            held.end()

    def open_session(self, lease: str, session: Session) -> None:
        """Accept streams of a lease."""
        with self._lock:
            self._sessions[lease] = session

    def close_session(self, lease: str) -> None:
        """Close the streams of a lease."""
        with self._lock:
            session = self._sessions.pop(lease, None)
        if session is not None:
            session.close()

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
            except OSError:
                if self._closed:
                    return
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
            stream.authenticate(self._token, client=False, seconds=CHALLENGE_SECONDS)
            frame = stream.receive(Deadline(CHALLENGE_SECONDS))
            document = attach_frames.decode_json(frame.document)
            if frame.header.kind == Request.ACQUIRE:
                self._serve_lease(_LeaseStream(self, self._leases, self._agent_id, stream, document))
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

    def _serve_lease(self, lease: _LeaseStream) -> None:
        with self._lock:
            self._lease_streams[lease.id] = lease
        try:
            lease.serve()
        finally:
            with self._lock:
                self._lease_streams.pop(lease.id, None)

    def _serve_calls(self, stream: FramedStream, lease: str) -> None:
        with self._lock:
            session = self._sessions.get(lease)
        if session is None:
            _refuse(stream, LeaseEndedError("the lease of the agent has ended"))
            return
        stream.send(attach_frames.encode(Response.OK))
        with session.serving(stream):
            CallStream(session, stream).serve()


class _LeaseStream:
    """A stream that acquires the agent: the lease, from then on."""

    def __init__(
        self,
        server: SessionServer,
        leases: LeaseManager,
        agent_id: str,
        stream: FramedStream,
        document: dict[str, Any],
    ) -> None:
        self._server = server
        self._leases = leases
        self._agent_id = agent_id
        self._stream = stream
        self._document = document
        self.id = str(document.get("lease", ""))
        self._session: Session | None = None
        self._send_lock = threading.Lock()
        self._over = False
        self._joined = False

    def end(self) -> None:
        """Record that the lease has ended."""
        if self._joined and not self._over:
            self._stream.shutdown()

    def serve(self) -> None:
        """Have the agent join, and keep the lease until the stream ends, or the client releases it."""
        document, stream = self._document, self._stream
        try:
            if document["agent"] != self._agent_id:
                raise DistNetworkError("this is another agent than the one that was offered; ask the gateway again")
            wanted = LeaseTerms(
                str(document["job"]),
                int(document["rank"]),
                int(document["world_size"]),
                float(document["timeout"]),
                str(document["holder"])[:500],
            )
            join_seconds = float(document["joining"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("an attached process sent a malformed lease request") from error
        except DistError as error:
            _refuse(stream, error)
            return
        delegated = bool(document.get("shares")) and stream.is_local
        # The join takes as long as it takes; meanwhile, this thread detects the end of the client.
        joiner = threading.Thread(
            target=self._join, args=(wanted, delegated, join_seconds), name="rankmesh-attached-join", daemon=True
        )
        joiner.start()
        reason, failed = f"its process ({wanted.holder}) ended without a goodbye", True
        try:
            while True:
                frame = stream.receive(None)
                if frame.header.kind == Request.RELEASE:
                    reason = str(attach_frames.decode_json(frame.document).get("reason", ""))[:500]
                    failed = False
                    break
                self._execute(frame)
        except (StreamClosedError, StreamTimeoutError):
            pass
        finally:
            self._over = True
            self._leases.release(self.id, reason, failed=failed)
            self._server.close_session(self.id)
            while joiner.is_alive():
                joiner.join(_RELEASE_RETRY_SECONDS)
                self._leases.release(self.id, reason, failed=failed)  # the join may not have begun at the first attempt
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK)

    def _join(self, wanted: LeaseTerms, delegated: bool, join_seconds: float) -> None:
        try:
            lease, agent = self._leases.acquire(wanted, self.id, delegated=delegated, join_seconds=join_seconds)
        except Exception as error:
            with contextlib.suppress(StreamClosedError, StreamTimeoutError):
                self._send(Response.ERROR, error_to_json(error))
            self._stream.shutdown()
            return
        self._session = session = Session(agent)
        self._joined = True
        self._server.open_session(self.id, session)
        if self._over:  # released before the session was there
            self._server.close_session(self.id)
        world, descriptors = describe_group(agent.world)
        document = {
            "lease": lease.id,
            "rank": agent.member.rank,
            "members": [vars(member) for member in agent.members()],
            "world": world.to_json(),
        }
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK, document, descriptors)

    def _execute(self, frame: Frame) -> None:
        """Execute a request over the lease's stream."""
        session, execute = self._session, _REQUESTS.get(frame.header.kind)
        if execute is None:
            raise ProtocolError(f"an attached process sent request {frame.header.kind} over its lease's connection")
        try:
            if session is None:
                raise LeaseEndedError("the agent has not joined yet, or will not")
            response = execute(session, attach_frames.decode_json(frame.document))
        except (ProtocolError, KeyError):
            raise
        except Exception as error:
            self._send(Response.ERROR, error_to_json(error))
        else:
            self._send(Response.OK, response or {})

    def _send(
        self, response: Response, document: dict[str, Any] | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        with self._send_lock:
            text = b"" if document is None else attach_frames.encode_json(document)
            self._stream.send(attach_frames.encode(response, text), (), descriptors)


_REQUESTS: dict[int, Callable[[Session, dict[str, Any]], dict[str, Any] | None]] = {
    Request.ABORT: Session.abort,
    Request.CANCEL: Session.cancel,
    Request.ABORT_PENDING_GROUPS: Session.abort_pending_groups,
    Request.REPORT: Session.report,
}


def _refuse(stream: FramedStream, error: BaseException) -> None:
    stream.send(attach_frames.encode(Response.ERROR, attach_frames.encode_json(error_to_json(error))))
