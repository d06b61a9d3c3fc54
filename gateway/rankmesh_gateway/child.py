"""``python -m rankmesh_gateway.child``: a gateway that a rank starts for its job, and that may outlive the rank.

The rank writes one line of JSON to the gateway's standard input, and closes that when it does not need the gateway any
more, or ends. From then on the gateway ends as soon as no rank is left, and new worlds meet elsewhere, unless the job
knows no other address. It writes lines of JSON to its standard error: its process id, log records, the jobs whose
worlds are complete, what has to wait for a free descriptor, and that it stays.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and os.fork():
    os._exit(0)  # so it is no child of the rank, whose program may wait for all of its own

import contextlib
import json
import logging
import socket
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.descriptors import exhausted_since
from rankmesh_agent.net.host import host_id
from rankmesh_agent.net.inherited import reset_inherited
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_gateway.server import Gateway, prepare_process
from rankmesh_gateway.state.registry import Registry

_TICK_SECONDS, _SHORT_TICK_SECONDS = 1.0, 0.1
"""Interval of looking for ranks that are left, and the one after the host, or while no descriptor is free."""
_PAUSE_SECONDS, _PAUSES = 0.02, 20
"""Minimum pause after looking, in seconds, and as a multiple of the time that it took."""


def main() -> int:
    """Serve until the host does not need the gateway any more, and no rank is left."""
    reset_inherited()
    options = json.loads(sys.stdin.buffer.readline())
    os.set_blocking(2, False)  # a host that is stopped reads nothing
    _tell_host(pid=os.getpid())
    _log_to_host(options["level"])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the host may be bound to one core, for itself
    prepare_process()
    listener = socket.socket(fileno=options["listener"])
    credentials = Credentials(**options["credentials"])
    settings = Settings(store_keys=options["store_keys"], store_bytes=options["store_bytes"])
    http = HttpServer(
        listener, "rankmesh-gateway", token=credentials, host=options["host"], advertise=tuple(options["advertise"])
    )
    gateway = Gateway(http, settings, credentials, names=[*options["names"], *http.names])
    registry = gateway.registry
    registry.id, registry.hosted = options["id"], True
    wakes: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_await_host, args=(wakes,), name="rankmesh-host", daemon=True).start()
    here = _LocalProcesses(registry, options["shm_dir"])
    hosted, complete, exhausted, looked = True, set[str](), "", 0.0
    with registry.events.subscribe(lambda: wakes.put("event")):
        gateway.start(on_failure=lambda: wakes.put("failure"))
        while not http.failure:
            if "host" in _received(wakes, _TICK_SECONDS if hosted and not exhausted else _SHORT_TICK_SECONDS):
                hosted = False
                if options["fixed"]:
                    registry.release_ranks()
                else:
                    registry.refuse_worlds()
            if exhausted := exhausted_since(looked):
                _tell_host(exhausted=exhausted)
            began = looked = time.monotonic()
            anyone = here.anyone_left()
            if not hosted and not anyone:
                break
            if (worlds := {*registry.stores().values()}) != complete:
                complete = worlds
                _tell_host(worlds=sorted(worlds))
            if not hosted:
                _tell_host(stays=True)
            time.sleep(max(_PAUSE_SECONDS, _PAUSES * (time.monotonic() - began)))  # a large world has many events
    gateway.close()
    return 1 if http.failure else 0


def _received(wakes: SimpleQueue[str], seconds: float) -> set[str]:
    """Wait for the first word, for so many seconds, and return all that have come."""
    words = set[str]()
    with contextlib.suppress(Empty):
        words.add(wakes.get(timeout=seconds))
        while True:
            words.add(wakes.get_nowait())
    return words


class _LocalProcesses:
    """Processes of this host's ranks: where all ranks are killed together, no peer reports the failures."""

    def __init__(self, registry: Registry, shm_dir: str) -> None:
        self._registry = registry
        self._host = host_id(shm_dir)
        self._seen: set[int] = set()

    def anyone_left(self) -> bool:
        """Return whether a rank is live, for all that is known; one that is silent, on another host, is not."""
        left = False
        for info in self._registry.ranks():
            pid, is_local = info.member.pid, info.member.host_id == self._host
            if info.state in ("joining", "alive") or (info.state == "suspect" and is_local):
                exists = is_local and os.path.exists(f"/proc/{pid}")
                if exists:
                    self._seen.add(pid)
                left = left or exists or not is_local or pid not in self._seen
        return left or bool(self._registry.waiting())


def _await_host(wakes: SimpleQueue[str]) -> None:
    """Wait until the host closes its end of standard input, or ends."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    wakes.put("host")


class _HostHandler(logging.Handler):
    """Sends log records to the host, whose logging decides about them."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        _tell_host(logger=record.name, level=record.levelno, text=self.format(record))


def _log_to_host(level: int) -> None:
    logger = logging.getLogger("rankmesh")
    logger.addHandler(_HostHandler())
    logger.propagate = False
    logger.setLevel(level)


def _tell_host(**document: Any) -> None:
    with contextlib.suppress(OSError):  # it has ended, or does not read
        os.write(2, json.dumps(document).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
