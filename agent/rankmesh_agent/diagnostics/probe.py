"""Probes of an agent for ``rankmesh doctor``: properties of its host, and the network paths to other agents.

An agent probes only addresses that its gateway lists, so no client can use it to reach other services. The report of a
broken path names the stage at which it ended, and the likely causes.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import urlsplit

from rankmesh_agent import native
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.host import host_id
from rankmesh_agent.net.http_client import HttpClient, NoResponseError
from rankmesh_agent.net.tls import DEFAULT_PORTS
from rankmesh_agent.net.tls_socket import OtherTokenError, TlsSocket
from rankmesh_agent.shared_memory.mapping import unsupported
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.schemas import (
    MAX_PROBE_BYTES,
    MAX_PROBE_SECONDS,
    HostReport,
    ProbeReply,
    ProbeRequest,
    ProbeStage,
)
from rankmesh_agent.wire.version import __version__

_GATEWAY_SECONDS = 5.0
_LISTED_SECONDS = 5.0
"""Lifetime of the cached list of agents; an address that is not in it causes a new request to the gateway."""
_ROUND_TRIPS = 5
"""Requests of which the fastest is the round-trip time."""
_CHUNK_BYTES = 256 << 10
_RETRY_SECONDS = 0.05


class AddressNotListedError(DistNetworkError):
    """The gateway lists no agent at the address, so the agent does not probe it."""

    code = "address-not-listed"
    status = 403


class _PathError(Exception):
    """Failure of a path at a stage."""

    def __init__(self, stage: ProbeStage, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage
        self.reason = reason


class Prober:
    """Measures network paths from this process, given the gateway's URL, the settings and the job's token of now."""

    def __init__(self, gateway: Callable[[], str], settings: Callable[[], Settings], token: Callable[[], str]) -> None:
        self._gateway = gateway
        self._settings = settings
        self._token = token
        self._lock = threading.Lock()
        self._listed: frozenset[str] = frozenset()
        self._listed_at = float("-inf")

    def host(self) -> HostReport:
        """Return the properties of this host."""
        return host_report(self._settings(), bool(self._token()))

    def probe(self, request: ProbeRequest) -> ProbeReply:
        """Measure the path to an agent; blocks for at most MAX_PROBE_SECONDS.

        Raises:
            AddressNotListedError: the gateway does not list the address.
            DistNetworkError: the gateway does not answer.
        """
        if not self._is_listed(request.url):
            raise AddressNotListedError(
                f"the gateway lists no agent at {request.url!r}; /v1/ranks and /v1/agents there show its list",
                address=request.url,
            )
        return measure(request.url, self._token(), request.bytes, request.seconds)

    def _is_listed(self, url: str) -> bool:
        with self._lock:
            fresh = time.monotonic() - self._listed_at < _LISTED_SECONDS
            if not (fresh and url in self._listed):
                self._listed = frozenset(self._list_agents())
                self._listed_at = time.monotonic()
            return url in self._listed

    def _list_agents(self) -> Iterator[str]:
        gateway = self._gateway()
        try:
            with contextlib.closing(HttpClient(self._token())) as client:
                for path in ("ranks", "agents"):
                    answer = client.request("GET", f"{gateway}/v1/{path}", timeout=_GATEWAY_SECONDS)
                    if answer.status != HTTPStatus.OK:
                        raise ValueError(f"it responded with status {answer.status}")
                    for entry in answer.json():
                        if path == "agents":
                            yield from entry["agent"]["urls"]
                        elif entry["state"] != "left":  # another program may have its port by now
                            yield entry["member"]["http"]
        except (NoResponseError, ValueError, TypeError, KeyError) as error:
            raise DistNetworkError(
                f"the gateway at {gateway} does not say which agents there are: {error}", address=gateway
            ) from error


def host_report(settings: Settings, token: bool) -> HostReport:
    """Return the properties of this host, for a process with a token or without; its load is 0 on Windows."""
    cpus = os.cpu_count() or 1
    total: int | None
    free: int | None
    try:
        total, _, free = shutil.disk_usage(settings.shm_dir)
    except OSError:
        total = free = None
    return HostReport(
        socket.gethostname(),
        host_id(settings.shm_dir),
        time.time(),
        __version__,
        platform.python_version(),
        f"{platform.system()} {platform.release()} {platform.machine()}",
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus,
        settings.transport,
        settings.shm_dir,
        total,
        free,
        unsupported() or ("" if total is not None else f"there is no directory {settings.shm_dir}"),
        settings.slot_bytes,
        native.reason,
        token,
        os.getloadavg()[0] / cpus if hasattr(os, "getloadavg") else 0.0,
    )


def measure(url: str, token: str, nbytes: int, seconds: float) -> ProbeReply:
    """Measure the path to an agent by its base URL, within some seconds, and fetch some bytes from it."""
    deadline = Deadline(min(MAX_PROBE_SECONDS, max(0.1, seconds)))
    nbytes = min(MAX_PROBE_BYTES, max(0, nbytes))
    reply = ProbeReply(url, reached=False)
    try:
        with contextlib.closing(_connected(url, token, deadline, reply)) as connection:
            for _ in range(_ROUND_TRIPS):
                seconds_taken = _fetch(connection, 0, token, deadline)
                reply.round_trip = min(seconds_taken, reply.round_trip or seconds_taken)
            if nbytes:
                seconds_taken = _fetch(connection, nbytes, token, deadline)
                reply.bytes, reply.seconds = nbytes, max(1e-9, seconds_taken - (reply.round_trip or 0.0))
        reply.reached = True
    except _PathError as error:
        reply.stage, reply.error = error.stage, error.reason
    return reply


def _connected(url: str, token: str, deadline: Deadline, reply: ProbeReply) -> http.client.HTTPConnection:
    peer = urlsplit(url)
    host, port = peer.hostname or "", peer.port or DEFAULT_PORTS.get(peer.scheme, 80)
    connection = http.client.HTTPConnection(host, port)
    began = time.perf_counter()
    try:
        connection.sock = connect(url, deadline.remaining(), token)
        reply.connect = time.perf_counter() - began
        if isinstance(connection.sock, TlsSocket):
            connection.sock.handshake()
    except OtherTokenError as error:
        connection.close()
        raise _other_token(f"{host} port {port}") from error
    except (socket.gaierror, UnicodeError) as error:
        why = f"the name {host!r} cannot be resolved on {socket.gethostname()}: {error}"
        raise _PathError("name", why) from error
    except (OSError, AuthenticationError, ValueError) as error:
        connection.close()
        if isinstance(error, OSError) and reply.connect is None:
            raise _connect_error(error, host, port, deadline) from error
        raise _PathError("connect", f"no TLS with {host} port {port}: {error}") from error
    return connection


def _connect_error(error: OSError, host: str, port: int, deadline: Deadline) -> _PathError:
    if isinstance(error, TimeoutError):
        return _PathError(
            "connect",
            f"no answer to a connection to {host} port {port} within {deadline.seconds:g} s: packets are dropped on "
            "the way; look for a firewall, a route that is missing, or a cable",
        )
    if error.errno == errno.ECONNREFUSED:
        return _PathError(
            "refused",
            f"{host} refuses connections to port {port}: nothing listens there; has the process ended, or is the "
            "address that of another host?",
        )
    return _PathError("route", f"no route to {host} port {port}: {error.strerror or error}; check routes and addresses")


def _fetch(connection: http.client.HTTPConnection, nbytes: int, token: str, deadline: Deadline) -> float:
    """Fetch bytes from an agent and return the seconds it took; raise _PathError if it does not send them."""
    arrived = 0
    sock = connection.sock
    peer = f"{connection.host} port {connection.port}"
    try:
        while True:
            began = time.perf_counter()
            sock.settimeout(max(1e-3, deadline.remaining()))
            headers = {"authorization": b"Bearer " + token.encode()} if token else {}
            connection.request("GET", f"/v1/probe?bytes={nbytes}", headers=headers)
            response = connection.getresponse()
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise _other_token(peer)
            if response.status != HTTPStatus.SERVICE_UNAVAILABLE or deadline.remaining() < _RETRY_SECONDS:
                break
            response.read(_CHUNK_BYTES)
            time.sleep(_RETRY_SECONDS)
        if response.status != HTTPStatus.OK:
            raise _PathError("stranger", f"{peer} responds with {response.status}: it is not an agent, or an older one")
        while chunk := response.read1(_CHUNK_BYTES):
            arrived += len(chunk)
            if arrived > nbytes:
                raise _PathError("stranger", f"{peer} sends more bytes than requested: it is not an agent")
            sock.settimeout(max(1e-3, deadline.remaining()))
        if arrived < nbytes:
            raise ConnectionResetError("the connection ended")
        response.read()  # reads no bytes, but ends the response and frees the connection for the next request
        return time.perf_counter() - began
    except TimeoutError:
        if arrived or nbytes:
            raise _PathError(
                "transfer",
                f"{arrived} of {nbytes} bytes came from {peer} within {deadline.seconds:g} s, although short responses "
                "do: large packets are lost (MTU, a bad cable), or the path is that slow",
            ) from None
        raise _PathError(
            "answer",
            f"{peer} accepts connections, but does not answer within {deadline.seconds:g} s: the process is stopped "
            "or too busy, or the path broke meanwhile",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _PathError("answer", f"{peer} ended the connection: {error or type(error).__name__}") from error


def _other_token(peer: str) -> _PathError:
    return _PathError("token", f"the agent at {peer} rejects the token of this agent: they are not of one job")
