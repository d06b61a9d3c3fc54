"""Server of the connections of a service, each with a thread, which sleeps in a system call most of the time."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rankmesh_agent.config.tls import tls_settings
from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.handshake import accept
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.hello import Client, Service, welcoming

GREETING_SECONDS = 10.0
"""Time limit for a client to prove that it has a credential."""
_STOP_SECONDS = 5.0

_log = logging.getLogger("rankmesh")

S = TypeVar("S", bound=FramedStream)


class StreamServer(Generic[S]):
    """Serves the connections of a service, from their first byte to their end: a ConnectionHandler.

    Args:
        service: the service, after which the threads are named.
        credentials: returns the credentials of the server: the authorities of TLS.
    """

    attachment_bytes = 0

    def __init__(
        self, service: Service, make: Callable[[socket.socket], S], credentials: Callable[[], Credentials]
    ) -> None:
        self.service, self._make = service, make
        self._credentials, self._tls = credentials, tls_settings()
        self._name = f"rankmesh-{service.name.lower()}"
        self._lock = threading.Lock()
        self._threads: dict[S, threading.Thread] = {}
        self._closed = False

    def accepted(self, credentials: Credentials, attachment: bytes) -> str | Credentials:
        """Return the credentials that may have a client with an attachment."""
        return credentials

    def serve(self, stream: S, client: Client) -> None:
        """Serve an accepted client to its end, in its thread."""
        raise NotImplementedError

    def handle(self, sock: socket.socket, admission: Admission) -> None:
        """Serve a connection that begins with the PREFACE of the service. From any thread."""
        try:
            stream = self._make(sock)
            thread = threading.Thread(target=self._run, args=(stream, admission), name=self._name, daemon=True)
            with self._lock:
                if not self._closed:
                    thread.start()
                    self._threads[stream] = thread
                    return
        except (OSError, RuntimeError) as error:  # the client is gone, or the system has no more threads
            log_failure(f"a client of {self._name} is not served", error)
        admission.end()
        sock.close()

    def close(self) -> None:
        """End the streams, and wait for their threads. Does nothing the second time."""
        with self._lock:  # a thread closes its socket only after it has taken the lock
            self._closed = True
            threads = dict(self._threads)
            for stream in threads:
                stream.shutdown()
        for thread in threads.values():
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)

    def _run(self, stream: S, admission: Admission) -> None:
        try:
            credentials = self._credentials()
            handshake = accept(
                stream.sock,
                self.service,
                lambda attachment: self.accepted(credentials, attachment),
                self.attachment_bytes,
                credentials,
                self._tls,
                welcoming(),
            )
            client = stream.greet(handshake, GREETING_SECONDS)
            admission.end()
            self.serve(stream, client)
        except (StreamClosedError, StreamTimeoutError, OSError, DistNetworkError) as error:
            # A port scan, an old version, a wrong token, a client that died: it gets no other response.
            _log.debug("a client of %s is gone, or not accepted: %s", self._name, error)
        except Exception:
            _log.exception("a connection of %s had to be closed", self._name)
        finally:
            admission.end()
            with self._lock:
                self._threads.pop(stream, None)
                stream.close()
