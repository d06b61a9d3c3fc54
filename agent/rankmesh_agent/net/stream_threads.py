"""Streams of a server, each with a thread that serves it, and sleeps in a system call most of the time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.stream import FramedStream

_STOP_SECONDS = 5.0

S = TypeVar("S", bound=FramedStream)


class StreamThreads(Generic[S]):
    """The streams of a server, from their first byte to their end. For several threads.

    Args:
        make: returns the stream of a connection.
        serve: serves a stream to its end. It ends the admission once the client is authenticated.
        name: of the threads.
        client: a client, for the log.
    """

    def __init__(
        self, make: Callable[[socket.socket], S], serve: Callable[[S, Admission], None], name: str, client: str
    ) -> None:
        self._make, self._serve = make, serve
        self._name, self._client = name, client
        self._lock = threading.Lock()
        self._threads: dict[S, threading.Thread] = {}
        self._closed = False

    def start(self, sock: socket.socket, admission: Admission) -> None:
        """Serve a connection from now on. It is closed if it cannot be served."""
        try:
            stream = self._make(sock)
            thread = threading.Thread(target=self._run, args=(stream, admission), name=self._name, daemon=True)
            with self._lock:
                if not self._closed:
                    thread.start()
                    self._threads[stream] = thread
                    return
        except (OSError, RuntimeError) as error:  # the client is gone, or the system has no more threads
            log_failure(f"{self._client} is not served", error)
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
            self._serve(stream, admission)
        finally:
            admission.end()
            with self._lock:
                self._threads.pop(stream, None)
                stream.close()
