"""Where an agent is asked over HTTP: a port, the addresses it is known by, and the thread that serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.http.server import HttpThread, Taker, bind, url_of
from rankmesh_agent.net.sockets import reachable_addresses
from rankmesh_agent.wire.upgrade import Upgrade


class Door:
    """An agent's HTTP port: bound when this is made, served from ``open`` to ``close``.

    Args:
        settings: what the environment says.
        host: address to listen on.
        port: 0 for any free one.

    Attributes:
        addresses: under which others can reach this process, in the order they should try them.
        names: the host names under which it may be asked.
        port: the port.
        urls: base URLs, one an address.

    Raises:
        ValueError: others could reach it, and there is no token.
        AddressInUseError: somebody else listens there.
    """

    def __init__(self, settings: Settings, host: str, port: int = 0) -> None:
        require_token_beyond_loopback(host, settings.token, "the agent")
        self._listener = bind(host, port, purpose="the agent serves HTTP")
        self._thread: HttpThread | None = None
        self.addresses, self.names = reachable_addresses(host, settings.advertise)
        self.port: int = self._listener.getsockname()[1]
        self.urls = [url_of(self._listener, address) for address in self.addresses]

    def open(self, make_app: Callable[[], Any], ways: Mapping[Upgrade, Taker], *, when_asked: bool) -> None:
        """Begin to serve; see HttpThread."""
        self._thread = HttpThread(
            make_app, self._listener, f"rankmesh-http-{self.port}", when_asked=when_asked, ways=ways
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the thread's event loop do something, and wait for that; nothing happens where there is none."""
        if self._thread is None or not self._thread.run(work):
            work.close()

    def close(self) -> None:
        """Finish the requests under way, then close. Does nothing the second time."""
        if self._thread is not None:
            self._thread.stop()
        else:
            self._listener.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors."""
        with contextlib.suppress(OSError):
            if self._thread is not None:
                self._thread.forget()
            else:
                self._listener.close()
