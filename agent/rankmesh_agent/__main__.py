"""Command line ``python -m rankmesh_agent``: a standalone agent as a process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import rankmesh_agent.config.linux  # noqa: F401  # checks the platform
from rankmesh_agent.config.service_log import log_to_stderr
from rankmesh_agent.config.settings import Settings, protection, read_token
from rankmesh_agent.net.descriptors import is_exhausted, raise_limit, reason
from rankmesh_agent.net.inherited import print_line, reset_inherited
from rankmesh_agent.net.tls import check_environment
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.version import __version__

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m rankmesh_agent") -> int:
    """Serve until SIGINT or SIGTERM; return 0 after a signal, and 2 if it could not start: standard error says why."""
    reset_inherited()
    options = _parser(prog).parse_args(arguments)
    raise_limit()
    try:
        settings = Settings.from_env(os.environ)
        check_environment(server=True)
        if options.token_file is not None:
            settings = replace(settings, token=read_token(options.token_file))
        gateway = _gateway(options.gateway or settings.gateway)
        agent = Standalone(
            settings, lambda: gateway, host=options.host, port=options.port, name=options.name, urls=options.url
        )
    except (ValueError, OSError, DistNetworkError) as error:
        print_line(f"{prog}: {reason(error) if is_exhausted(error) else error}", sys.stderr)
        return USAGE_ERROR
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    log_to_stderr()
    try:
        agent.start(ending.set)
        place = f"{agent.urls[0]}, for the gateway at {gateway}"
        print_line(f"RankMesh agent {agent.name} is ready at {place}; {protection(settings.token)}", sys.stdout)
        ending.wait()
    finally:
        agent.close(f"its agent failed: {agent.failure}" if agent.failure else "its agent was stopped by a signal")
    return 1 if agent.failure else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a standalone agent: it takes part in a job as a rank, for a process that attaches to it or an "
        "HTTP client.",
        epilog="The token is taken from RANKMESH_TOKEN, or from a file. RANKMESH_ADVERTISE lists the addresses under "
        "which other agents reach this one. RANKMESH_SHM_DIR is the directory of the memory that it shares with "
        "processes of its host.",
    )
    parser.add_argument("--gateway", metavar="URL", help="the gateway (default: RANKMESH_GATEWAY)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8701, help="port, 0 for any free one (default: %(default)s)")
    parser.add_argument(
        "--name", default="", help="its name (default: the host's); agents are leased in the order of their names"
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="another URL under which clients reach it"
    )
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the token")
    parser.add_argument("--version", action="version", version=f"RankMesh {__version__}")
    return parser


def _gateway(url: str | None) -> str:
    if not url:
        raise ValueError("no gateway: give --gateway http://host:8700, or set RANKMESH_GATEWAY")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port
        valid = False
    if not valid:
        raise ValueError(f"the gateway {url!r} is no URL of the form http://host:port")
    return url.rstrip("/")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
