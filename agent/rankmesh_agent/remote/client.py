"""The connections of an attached process to its agent: the one that is the lease, and any number for calls."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.stream import Frame, FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote import codec
from rankmesh_agent.wire import attach_frames, upgrade
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.schemas import AgentHeartbeat

MOST_IDLE = 8
"""How many lanes are kept that nobody uses."""
_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 10.0
"""How much longer than a call may take its answer may: the agent says first that it is late."""

Views = Sequence[memoryview]
Note = Callable[[], str] | None


class AgentDialer:
    """The way to an agent: its unix socket on this host, or else the first of its addresses that answers.

    Args:
        agent: whom to reach.
        path: of its unix socket, '' if it is on another host.
        token: the job's token.
    """

    def __init__(self, agent: AgentHeartbeat, path: str, token: str) -> None:
        self._urls = list(agent.urls)
        self._path = path if path and os.path.exists(path) else ""
        self._token = token
        self._name = f"agent {agent.name!r} ({agent.host}, pid {agent.pid})"

    def connect(self, deadline: Deadline) -> FramedStream:
        """Return a connection over which both ends have proved that they know the token.

        Raises:
            DistNetworkError: nobody can be reached; says where it was tried, and what happened.
            AuthenticationError: the agent has another token.
        """
        failures = []
        ways: list[str] = ([self._path] if self._path else []) + self._urls
        for way in ways:
            try:
                channel = self._open(way, max(0.1, min(_CONNECT_SECONDS, deadline.remaining())))
            except (OSError, ValueError, StreamClosedError, StreamTimeoutError, ProtocolError) as error:
                failures.append(f"{way}: {error}")
                continue
            if way != self._path and way != self._urls[0]:
                self._urls.remove(way)
                self._urls.insert(0, way)  # the next one need not try the others
            return channel
        tried = "; ".join(failures) or "it has no address"
        raise DistNetworkError(
            f"{self._name} cannot be reached: {tried}. Can this host connect to any of its addresses "
            "(RANKMESH_ADVERTISE and --url, there)?",
            address=ways[0] if ways else None,
        )

    def _open(self, way: str, seconds: float) -> FramedStream:
        if way == self._path:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(way)
            except BaseException:
                sock.close()
                raise
        else:
            sock = _upgraded(way, seconds)
        try:
            channel = FramedStream(sock)
            channel.authenticate(self._token, client=True, seconds=seconds)
        except BaseException:
            sock.close()
            raise
        return channel


def _upgraded(url: str, seconds: float) -> socket.socket:
    """Return a connection to an agent's HTTP port on which the protocol is the attached process's from now on."""
    split = urlsplit(url)
    if split.scheme != "http" or not split.hostname:
        raise ValueError("it is no URL of the form http://host:port")
    sock = socket.create_connection((split.hostname, split.port or 80), seconds)
    try:
        sock.settimeout(seconds)
        break_when_peer_vanishes(sock)
        sock.sendall(attach_frames.UPGRADE.request(split.netloc))
        head = b""
        while not upgrade.switched(head):
            more = sock.recv(1)  # what follows the head is not for us
            if not more:
                raise StreamClosedError("it hung up")
            head += more
    except BaseException:
        sock.close()
        raise
    return sock


class ControlConnection:
    """The connection that is the lease. Any thread may use it.

    Args:
        channel: claimed the agent.
    """

    def __init__(self, channel: FramedStream) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._unread = 0

    def request(self, kind: Request, document: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Ask for something, and return the answer.

        Raises:
            StreamClosedError, StreamTimeoutError: the agent is gone, or does not answer.
            DistError: it refuses.
        """
        with self._lock:
            self._channel.send(attach_frames.encode(kind, attach_frames.encode_json(document)))
            self._unread += 1
            deadline = Deadline(seconds)
            while True:  # who was interrupted as it waited has left its answer behind
                frame = self._channel.receive(deadline)
                self._unread -= 1
                if not self._unread:
                    break
        said = attach_frames.decode_json(frame.document) if frame.document else {}
        if frame.header.kind == Response.ERROR:
            raise codec.error_from_json(said)
        return said

    def close(self) -> None:
        """End the lease, if it has not ended."""
        self._channel.close()


class ConnectionPool:
    """The connections for calls: each call has one to itself, so those of several threads do not wait for each other.

    Args:
        open_lane: returns a new one.
    """

    def __init__(self, open_lane: Callable[[], FramedStream]) -> None:
        self._open = open_lane
        self._idle: list[FramedStream] = []
        self._all: set[FramedStream] = set()
        self._closed = False

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
    ) -> Frame:
        """Ask for something in this thread, and return the answer.

        Args:
            kind: for what.
            document: the rest of it.
            seconds: how long it may take.
            up: arrays that go along.
            down: where those go that come back, if any come.
            flags: see attach_frames.
            note: returns what else there is to say of the call, if the agent asks.
            descriptors: whether some may come back.

        Raises:
            StreamClosedError, StreamTimeoutError: the agent is gone, or does not answer.
        """
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = self._new()
        try:
            lane.send(attach_frames.encode(kind, document, sum(map(len, up)), flags), up)
            deadline = Deadline(seconds + _GRACE_SECONDS)
            while True:
                frame = lane.receive(deadline, descriptors=descriptors)
                if frame.header.kind != Response.NEED_NOTE:
                    break
                lane.send(attach_frames.encode(Request.NOTE, (note() if note is not None else "").encode()))
            if frame.header.payload:
                if frame.header.payload != sum(map(len, down)):
                    raise ProtocolError(f"the agent answered {frame.header.payload} bytes where others were expected")
                lane.receive_into(down)
        except BaseException:  # Ctrl-C too: whatever comes over the lane now belongs to this call
            self._end(lane)
            raise
        self._keep(lane)
        return frame

    def close(self) -> None:
        """End all lanes; calls under way end with StreamClosedError."""
        self._closed = True
        for lane in list(self._all):
            lane.shutdown()
        self._close_idle()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors."""
        self._closed = True
        for lane in list(self._all):
            lane.close()

    def _new(self) -> FramedStream:
        if self._closed:
            raise StreamClosedError("this process has left the job")
        lane = self._open()
        self._all.add(lane)
        if self._closed:
            self._end(lane)
            raise StreamClosedError("this process has left the job")
        return lane

    def _keep(self, lane: FramedStream) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(lane)
            if self._closed:
                self._close_idle()
        else:
            self._end(lane)

    def _end(self, lane: FramedStream) -> None:
        self._all.discard(lane)
        lane.close()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._end(self._idle.pop())
