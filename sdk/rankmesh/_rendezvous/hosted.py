"""A gateway that this process starts for its job, and its address as it is published."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import NamedTuple

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.config.tls import server_scheme
from rankmesh_agent.net.descriptors import note_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import bind, reachable_addresses, url_for
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistNetworkError

_CLOSE_SECONDS = 5.0
"""Limit for the gateway's answer, whether it ends at once."""

_HEALTH_SECONDS = 2.0

_log = logging.getLogger("rankmesh")


class GatewayAddress(NamedTuple):
    """The address of one gateway.

    A URL alone is ambiguous if it is read after the gateway has ended: the port may belong to another process by then,
    even to another job's gateway.

    Attributes:
        id: the random id in the gateway's ``/health``.
    """

    url: str
    id: str

    def is_there(self) -> bool | None:
        """Return whether this gateway answers at the URL; None if nothing does, but it may again.

        False says that it has ended: nothing listens there, or something else.
        """
        from rankmesh_agent.net.http_client import HttpClient, NoResponseError

        with contextlib.closing(HttpClient()) as http:
            try:
                health = http.request("GET", f"{self.url}/health", timeout=_HEALTH_SECONDS).json()
            except NoResponseError as error:
                return False if isinstance(error.__cause__, ConnectionRefusedError) else None
            except ValueError:
                return False
        return isinstance(health, dict) and health.get("id") == self.id

    def to_json(self) -> str:
        """Return the address as JSON text."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | bytes) -> GatewayAddress | None:
        """Parse the output of ``to_json``; None if the text is something else."""
        with contextlib.suppress(ValueError):
            match json_text.loads(text):
                case {"url": str(url), "id": str(id)}:
                    return cls(url, id)
        return None


class HostedGateway:
    """A gateway that this process has started: a process of its own, which ends after the last rank.

    Args:
        fixed: whether the job's next gateway has the same address: then new worlds meet at this one while it lasts.

    Attributes:
        pid: the gateway's process, once it has started; 0 before.
    """

    def __init__(
        self, host: str, port: int, settings: Settings, names: tuple[str, ...] = (), *, fixed: bool = False
    ) -> None:
        require_token_beyond_loopback(host, settings.token, "the gateway")
        listener = bind(host, port, purpose="this process hosts the gateway")
        self._worlds: frozenset[str] = frozenset()
        self._ended = threading.Event()
        self._last = ""
        self.pid = 0
        with listener:
            # The first one beyond loopback: a host name may resolve to a loopback address.
            addresses = reachable_addresses(host, settings.advertise)[0]
            address = next((each for each in addresses if not is_loopback(each)), addresses[0])
            url = url_for(address, listener.getsockname()[1], server_scheme())
            self.address = GatewayAddress(url, secrets.token_hex(8))
            options = {
                "listener": listener.fileno(),
                "host": host,
                "advertise": settings.advertise,
                "names": names,
                "fixed": fixed,
                "id": self.address.id,
                "credentials": asdict(settings.credentials),
                "store_keys": settings.store_keys,
                "store_bytes": settings.store_bytes,
                "shm_dir": settings.shm_dir,
                "level": _log.getEffectiveLevel(),
            }
            place = {"RANKMESH_GATEWAY": url, "RANKMESH_JOB": settings.job, "RANK": str(settings.rank or 0)}
            self._process = _start(listener.fileno(), place)
        assert self._process.stdin is not None
        close_in_children(self._process.stdin)  # by the pipe's end the gateway knows that this process has ended
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with a reason
            self._process.stdin.write(json.dumps(options).encode() + b"\n")
            self._process.stdin.flush()
        self._thread = threading.Thread(target=self._listen, name="rankmesh-gateway-log", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise if no process can reach the gateway."""
        if self._ended.is_set():
            raise DistNetworkError(
                f"the gateway, process {self.pid} that this one started, has ended at {self.address.url}"
                f"{f': {self._last}' if self._last else ''}",
                address=self.address.url,
            )

    def has_world(self, job: str) -> bool:
        """Return whether a world of the job is complete at this gateway, as far as this process knows."""
        return job in self._worlds

    def close(self) -> None:
        """Do without the gateway from now on: it ends as soon as no rank is left. Waits until it ends or stays."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._thread.join(_CLOSE_SECONDS)

    def _listen(self) -> None:
        """Log what the gateway reports, until it ends, or stays without this process."""
        process = self._process
        process.wait()  # the gateway itself is no child of this process
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                match _document(line):
                    case {"text": str(text), "logger": str(name), "level": int(level)}:
                        logging.getLogger(name).log(level, "%s", text)
                        self._last = text.partition("\n")[0]
                    case {"pid": int(pid)}:
                        self.pid = pid
                    case {"exhausted": str(text)}:  # so this rank is the cause of what waits for the gateway
                        note_exhausted(f"its gateway, process {self.pid}: {text}")
                    case {"worlds": list(jobs)}:
                        self._worlds = frozenset(jobs)
                    case {"stays": True}:
                        break
                    case None:  # of a traceback
                        self._last = line.decode(errors="replace").strip() or self._last
            else:
                self._ended.set()


def _document(line: bytes) -> object:
    try:
        return json_text.loads(line)
    except ValueError:
        return None


def _start(listener: int, place: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the gateway's process, with this one's modules; commands find the job by the variables of its place."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)} | place
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rankmesh_gateway.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=(listener,),
            start_new_session=True,  # Ctrl-C in the terminal is for the ranks
        )
    except OSError as error:
        raise DistNetworkError(
            f"cannot start the job's gateway, a process of {sys.executable!r}: {error.strerror}"
        ) from error
