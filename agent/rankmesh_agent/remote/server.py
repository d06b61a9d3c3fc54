"""Takes in the processes that attach to a standalone agent: at a unix socket, and through its HTTP port.

Each connection has a thread, which sleeps in a system call most of the time: a call is made in the thread that received
it, and nothing is handed on. The connection that claims the agent is the lease.
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
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.address import listen, socket_path
from rankmesh_agent.remote.codec import describe_group
from rankmesh_agent.remote.lease import LeaseManager
from rankmesh_agent.remote.session import Session
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError, DistNetworkError, LeaseEndedError, ProtocolError
from rankmesh_agent.wire.schemas import LeaseTerms

CHALLENGE_SECONDS = 10.0
"""How long a stranger may take to prove that it belongs here, and to say what for."""
MAX_CONNECTIONS = 512
"""How many there may be at once, each with a thread; more are closed unheard."""
_STOP_SECONDS = 5.0
_AGAIN_SECONDS = 0.5

_log = logging.getLogger("rankmesh")


class SessionServer:
    """An agent's side of all connections of processes that are attached to it.

    Args:
        landlord: has the agent to give away.
        agent_id: its id, see AgentHeartbeat.
        token: the job's token.
        shm_dir: where it shares memory, and the unix socket is made.
    """

    def __init__(self, landlord: LeaseManager, agent_id: str, token: str, shm_dir: str) -> None:
        self._landlord = landlord
        self._agent_id = agent_id
        self._token = token
        self._shm_dir = shm_dir
        self._path = socket_path(shm_dir, agent_id)
        self._lock = threading.Lock()
        self._channels: dict[FramedStream, threading.Thread] = {}
        self._desks: dict[str, Session] = {}
        self._leases: dict[str, _Lease] = {}
        self._closed = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the unix socket; where that is not possible, processes attach through the HTTP port alone."""
        try:
            listener = listen(self._shm_dir, self._agent_id)
        except OSError as error:
            why = error.strerror or error
            _log.warning("no unix socket at %s, so processes attach over TCP: %s", self._path, why)
            return
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="rankmesh-attend", daemon=True)
        self._thread.start()

    def handle(self, sock: socket.socket) -> None:
        """Serve a connection whose client asked for it over HTTP. From any thread."""
        try:
            sock.settimeout(CHALLENGE_SECONDS)
            break_when_peer_vanishes(sock)
            sock.sendall(attach_frames.UPGRADE.switching())
        except OSError:
            sock.close()
            return
        self._admit(sock)

    def close(self) -> None:
        """End all leases and connections. Does nothing the second time."""
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            channels = dict(self._channels)
        if listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for channel in channels:
            channel.shutdown()
        for thread in [*channels.values(), *([self._thread] if self._thread is not None else [])]:
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)

    def end_lease(self, lease: str) -> None:
        """End the connections of a lease that has ended: its process learns of it, if it did not end it."""
        self._shut(lease)
        with self._lock:
            held = self._leases.get(lease)
        if held is not None:
            held.end()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for channel in list(self._channels):
            channel.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # short of descriptors: it stays in the queue
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            channel = FramedStream(sock)
        except OSError:
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(channel,), name="rankmesh-attached", daemon=True)
        with self._lock:
            full = len(self._channels) >= MAX_CONNECTIONS
            if not self._closed and not full:
                self._channels[channel] = thread
                thread.start()
                return
        if full:
            _log.warning("an attached process was refused: there are %d connections already", MAX_CONNECTIONS)
        channel.close()

    def _serve(self, channel: FramedStream) -> None:
        try:
            channel.authenticate(self._token, client=False, seconds=CHALLENGE_SECONDS)
            frame = channel.receive(Deadline(CHALLENGE_SECONDS))
            said = attach_frames.decode_json(frame.document)
            if frame.header.kind == Request.ACQUIRE:
                self._hold(_Lease(self, channel, said))
            elif frame.header.kind == Request.OPEN_STREAM:
                self._lane(channel, str(said.get("lease", "")))
        except (StreamClosedError, StreamTimeoutError, DistNetworkError):
            pass  # a port scan, an old version, a wrong token, a client that died: it learns nothing more
        except Exception:
            _log.exception("a connection of an attached process had to be closed")
        finally:
            channel.close()
            with self._lock:
                self._channels.pop(channel, None)

    def _hold(self, lease: _Lease) -> None:
        with self._lock:
            self._leases[lease.id] = lease
        try:
            lease.serve()
        finally:
            with self._lock:
                self._leases.pop(lease.id, None)

    def _lane(self, channel: FramedStream, lease: str) -> None:
        with self._lock:
            desk = self._desks.get(lease)
        if desk is None:
            refuse(channel, LeaseEndedError("the lease of the agent has ended"))
            return
        channel.send(attach_frames.encode(Response.OK))
        desk.serve_stream(channel)

    def _open(self, lease: str, desk: Session) -> None:
        with self._lock:
            self._desks[lease] = desk

    def _shut(self, lease: str) -> None:
        with self._lock:
            desk = self._desks.pop(lease, None)
        if desk is not None:
            desk.close()


class _Lease:
    """A connection that claims the agent: the lease, from then on."""

    def __init__(self, attendance: SessionServer, channel: FramedStream, said: dict[str, Any]) -> None:
        self._attendance = attendance
        self._landlord = attendance._landlord
        self._channel = channel
        self._said = said
        self.id = str(said.get("lease", ""))
        self._desk: Session | None = None
        self._sending = threading.Lock()
        self._over = False
        self._joined = False

    def end(self) -> None:
        """Take note that the lease has ended."""
        if self._joined and not self._over:
            self._channel.shutdown()

    def serve(self) -> None:
        """Have the agent join, and keep the lease until the connection ends, or the client says goodbye."""
        said, channel = self._said, self._channel
        try:
            if said["agent"] != self._attendance._agent_id:
                raise DistNetworkError("this is another agent than the one that was offered; ask the gateway again")
            wanted = LeaseTerms(
                str(said["job"]),
                int(said["rank"]),
                int(said["world_size"]),
                float(said["timeout"]),
                str(said["holder"])[:500],
            )
            joining = float(said["joining"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("an attached process claimed the agent for no job") from error
        except DistError as error:
            refuse(channel, error)
            return
        lends = bool(said.get("shares")) and channel.is_local
        # The join takes as long as it takes; meanwhile, this thread notices if the client goes.
        joiner = threading.Thread(
            target=self._join, args=(wanted, lends, joining), name="rankmesh-attached-join", daemon=True
        )
        joiner.start()
        reason, failed = f"its process ({wanted.holder}) ended without a goodbye", True
        try:
            while True:
                frame = channel.receive(None)
                if frame.header.kind == Request.RELEASE:
                    reason = str(attach_frames.decode_json(frame.document).get("reason", ""))[:500]
                    failed = False
                    break
                self._do(frame)
        except (StreamClosedError, StreamTimeoutError):
            pass
        finally:
            self._over = True
            self._landlord.release(self.id, reason, failed=failed)
            self._attendance._shut(self.id)
            while joiner.is_alive():
                joiner.join(_AGAIN_SECONDS)
                self._landlord.release(self.id, reason, failed=failed)  # it may not have begun when it was told to end
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK)

    def _join(self, wanted: LeaseTerms, lends: bool, joining: float) -> None:
        try:
            lease, agent = self._landlord.acquire(wanted, self.id, lends=lends, joining=joining)
        except Exception as error:
            with contextlib.suppress(StreamClosedError, StreamTimeoutError):
                self._send(Response.ERROR, codec.error_to_json(error))
            self._channel.shutdown()
            return
        self._desk = desk = Session(agent)
        self._joined = True
        self._attendance._open(self.id, desk)
        if self._over:  # released before the desk was there
            self._attendance._shut(self.id)
        told, descriptors = describe_group(agent.world)
        document = {
            "lease": lease.id,
            "rank": agent.member.rank,
            "members": [vars(member) for member in agent.members()],
            "world": told.to_json(),
        }
        with contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._send(Response.OK, document, descriptors)

    def _do(self, frame: Frame) -> None:
        """Do what the client asks for besides calls."""
        desk, ask = self._desk, _ASKS.get(frame.header.kind)
        if ask is None:
            raise ProtocolError(f"an attached process asked for {frame.header.kind} over its lease's connection")
        try:
            if desk is None:
                raise LeaseEndedError("the agent has not joined yet, or will not")
            found = ask(desk, attach_frames.decode_json(frame.document))
        except (ProtocolError, KeyError):
            raise
        except Exception as error:
            self._send(Response.ERROR, codec.error_to_json(error))
        else:
            self._send(Response.OK, found or {})

    def _send(self, answer: Response, document: dict[str, Any] | None = None, descriptors: Sequence[int] = ()) -> None:
        with self._sending:
            text = b"" if document is None else attach_frames.encode_json(document)
            self._channel.send(attach_frames.encode(answer, text), (), descriptors)


_ASKS: dict[int, Callable[[Session, dict[str, Any]], dict[str, Any] | None]] = {
    Request.ABORT: Session.abort,
    Request.CANCEL: Session.cancel,
    Request.ABORT_PENDING_GROUPS: Session.abort_pending_groups,
    Request.REPORT: Session.report,
}


def refuse(channel: FramedStream, error: BaseException) -> None:
    """Answer with an error."""
    channel.send(attach_frames.encode(Response.ERROR, attach_frames.encode_json(codec.error_to_json(error))))
