"""``python -m rankmesh_gateway``: the gateway as a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import rankmesh_agent.config.linux  # noqa: F401  # checks the platform
from rankmesh_agent.config.service_log import log_to_stderr
from rankmesh_agent.config.settings import Settings, create_token, protection, read_token, require_token_beyond_loopback
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.descriptors import is_exhausted, reason
from rankmesh_agent.net.inherited import print_line, reset_inherited
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.net.tls import check_environment
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.server import Gateway, prepare_process
from rankmesh_gateway.state.event_log import EventKind, EventLog
from rankmesh_gateway.state.registry_file import RegistryFile, RegistryFileError
from rankmesh_gateway.torch_store import TorchStore

USAGE_ERROR = 2
_WARNINGS: frozenset[EventKind] = frozenset({"rank-suspect", "rank-failed", "group-failed", "agent-lost"})
_LEFT_OUT: frozenset[EventKind] = frozenset({"group-made", "group-ended"})
"""A program may make any number of groups; rank-left is the end of a job."""
_PAUSE_SECONDS = 0.05
"""Minimum time between two looks for events: thousands of joins in a second do not wake this thread each."""
_NO_TORCH_STORE = (
    "this gateway serves any number of jobs, and torch's protocol does not name one; the gateway that 'rankmesh run' "
    "hosts serves it"
)


_log = logging.getLogger("rankmesh.gateway")


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m rankmesh_gateway") -> int:
    """Serve until SIGINT or SIGTERM; return the exit status: 2 if the gateway could not start."""
    reset_inherited()
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    if options.make_token and options.token_file is None:
        parser.error("--make-token needs --token-file, the file to write it to")
    prepare_process()
    with contextlib.ExitStack() as opened:
        try:
            if options.make_token:
                create_token(options.token_file)
            settings = Settings.from_env(os.environ)
            check_environment(server=True)
            token = read_token(options.token_file) if options.token_file else settings.token
            credentials = replace(settings, token=token).credentials
            require_token_beyond_loopback(options.host, token, "the gateway")
            file = RegistryFile(options.state) if options.state is not None else None
            if file is not None:
                opened.callback(file.close)
            etcd = None
            if options.store:
                from rankmesh_gateway.state.etcd_stores import EtcdStores

                etcd = EtcdStores(options.store)
            listener = bind(options.host, options.port, purpose="the gateway listens")
            opened.callback(listener.close)
            names = [options.host, socket.gethostname(), *(each.partition(":")[0] for each in settings.advertise)]
            server = HttpServer(listener, "rankmesh-gateway", token=credentials)
            refused = TorchStore(settings, closed=_NO_TORCH_STORE)
            gateway = Gateway(server, settings, credentials, names=names, torch_store=refused, file=file, backend=etcd)
        except (ValueError, OSError, DistNetworkError, DistStoreError, RegistryFileError) as error:
            print_line(f"{prog}: {reason(error) if is_exhausted(error) else error}", sys.stderr)
            return USAGE_ERROR
        opened.pop_all()
        log_to_stderr()
        # Unlike an Event's set(), its put() may interrupt the thread's get().
        going_on: SimpleQueue[bool] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: going_on.put(False))
        events = gateway.registry.events
        position = events.last
        with events.subscribe(lambda: None if going_on.qsize() else going_on.put(True)):
            gateway.start(on_failure=lambda: going_on.put(False))
            print_line(f"RankMesh gateway is ready at {server.url()}", sys.stdout)
            if not token:
                print_line(f"It is {protection(token)}: no token is set", sys.stdout)
            while going_on.get():
                position = log_events(events, position)
                time.sleep(_PAUSE_SECONDS)
        gateway.close()
        log_events(events, position)
    return 1 if server.failure else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a gateway, at which ranks meet: its address is MASTER_ADDR:MASTER_PORT or RANKMESH_GATEWAY "
        "in their environment.",
        epilog="The token is taken from RANKMESH_TOKEN, or from a file. RANKMESH_ADVERTISE lists host names, "
        "besides the machine's own, under which ranks reach the gateway.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8700, help="port, 0 for any free one (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the token")
    parser.add_argument("--make-token", action="store_true", help="write a new token to that file if it does not exist")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="PATH",
        help="SQLite file for jobs, their key-value stores and events, which the next gateway goes on with; "
        "created if it does not exist",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="etcd://HOST:PORT[/PREFIX]: keep the key-value stores in etcd, so that a gateway on any host can go on; "
        "etcds:// with TLS",
    )
    parser.add_argument("--version", action="version", version=f"RankMesh {__version__}")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def log_events(events: EventLog, position: int) -> int:
    """Log the events behind a position; return the position behind them."""
    if events.has_dropped(position):
        _log.warning("more events have happened than are kept: the first of them are not logged")
    for event in events.since(position):
        position = event.id
        if event.kind not in _LEFT_OUT:
            data = json.loads(event.data)
            job, detail = f"job {data['job']!r}", data["detail"]
            named = not data["job"] or job in detail
            level = logging.WARNING if event.kind in _WARNINGS else logging.INFO
            _log.log(level, "%s", detail if named else f"{job}: {detail}")
    return position


if __name__ == "__main__":
    sys.exit(main())
