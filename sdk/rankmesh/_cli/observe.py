"""``rankmesh observe``: runs a rank of another library's job, or a launcher, and watches the ranks from outside."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from rankmesh._cli.exit_codes import OK, USAGE, print_error
from rankmesh._launcher.signals import pdeathsig
from rankmesh._rendezvous.locator import LOOPBACK, GatewayLocator, KnownGateway, with_master_address
from rankmesh._rendezvous.tcp import TcpLocator
from rankmesh_agent.config.launchers import FIRST_PORT, PORTS
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.observe.processes import RankProcess, rank_of, ranks_below
from rankmesh_agent.observe.rank import ObservedRank
from rankmesh_agent.wire.errors import DistError

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal sends to the command as well."""
_SEARCH_SECONDS = 0.5


def main(arguments: Sequence[str]) -> int:
    """Run a command, or watch processes; return the command's exit code, or end by its signal."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("give a command, or --pid and process ids")
    if options.gateway:
        from rankmesh._cli.options import base_url  # only here: typer takes memory

        options.gateway = base_url(options.gateway)
    if options.pid:
        return _watch(options)
    try:
        child = _start(options.command)
    except OSError as error:
        print_error(f"cannot run {options.command[0]!r}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126
    observer = Observer(options.gateway, options.job, lambda: ranks_below(child.pid).values())
    threading.Thread(target=observer.run, name="rankmesh-observe", daemon=True).start()
    code = child.wait()
    observer.end({child.pid: _ending(code)} if code else {})
    return code if code >= 0 else _end_by(-code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankmesh observe",
        usage="rankmesh observe [options] COMMAND [ARG ...]\n       rankmesh observe [options] --pid PID [PID ...]",
        description="Run a rank of a job whose traffic is not RankMesh's (mpi4py, torch.distributed, ...), or the "
        "launcher of its ranks on this host, and watch the ranks from outside, so that 'rankmesh diagnose', "
        "'rankmesh stacks', 'rankmesh status' and the dashboard show them: 'mpirun -n 8 rankmesh observe python "
        "solve.py', 'torchrun --no-python rankmesh observe python train.py'. Rank and number of ranks are those of the "
        "launcher's variables. The exit code is the command's; signals are passed on to it.",
    )
    parser.add_argument("--gateway", default="", metavar="URL", help="the gateway; by default rank 0 starts one")
    parser.add_argument("--job", default="", metavar="NAME", help="name of the job; by default from the launcher")
    parser.add_argument("--pid", action="store_true", help="watch processes that run already: give their ids")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command, which ends with this process; in a group of its own, unless that has the terminal."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    child = subprocess.Popen(command, preexec_fn=pdeathsig(), process_group=None if has_terminal else 0)
    for number in _FORWARDED + (() if has_terminal else _FROM_TERMINAL):
        signal.signal(number, lambda number, _: child.send_signal(number))
    for number in _FROM_TERMINAL if has_terminal else ():
        signal.signal(number, lambda *_: None)
    return child


def _end_by(number: int) -> int:
    """End by a signal, as the command has, whose core dump is the only one; return a shell's status if that fails."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _ending(code: int) -> str:
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name} ({-code})"
    return f"its process ended with {how}"


def _watch(options: argparse.Namespace) -> int:
    """Watch processes until they have ended, or Ctrl-C."""
    try:
        found = _numbered([int(pid) for pid in options.command])
    except ValueError as error:
        print_error(str(error))
        return USAGE
    observer = Observer(options.gateway, options.job, lambda: [each for each in found if _runs(each.pid)] or None)
    with suppress(KeyboardInterrupt):
        observer.run()
    observer.end({})
    return OK


def _numbered(pids: Sequence[int]) -> list[RankProcess]:
    """Return the processes with the ranks of their environments, or numbered in their order if none has one."""
    found = [rank_of(pid) for pid in pids]
    ranks = {each.rank: each for each in found if each is not None}
    if not pids or not all(map(_runs, pids)):
        raise ValueError(f"--pid needs the ids of running processes, got {' '.join(map(str, pids)) or 'none'}")
    if not ranks:
        return [RankProcess(pid, rank, len(pids)) for rank, pid in enumerate(pids)]
    size = max(each.world_size for each in ranks.values())
    if len(pids) != size or len(ranks) != size:
        raise ValueError(f"--pid needs the processes of all ranks: they are {size}, got {len(ranks)} of them")
    return list(ranks.values())


def _runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


class Observer:
    """The ranks that this process watches, as they come and go.

    Args:
        gateway: URL of the gateway; empty to start one, or that which rank 0's observer starts.
        job: the job's name; empty for the launcher's.
        find: returns the processes that run now; None once there will be no more.
    """

    def __init__(self, gateway: str, job: str, find: Callable[[], Iterable[RankProcess] | None]) -> None:
        self._gateway, self._job, self._find = gateway, job, find
        self._locator: GatewayLocator | None = None
        self._ranks: dict[int, ObservedRank | None] = {}
        """By process; None while it joins."""
        self._ended = threading.Event()

    def run(self) -> None:
        """Watch the ranks, until they have ended or ``end`` is called; a failure to observe them is a warning."""
        try:
            settings = Settings.from_env(os.environ)
            self._locator, settings = _located(self._gateway, self._job, settings)
            while not self._ended.is_set() and (running := self._find()) is not None:
                found = {each.pid: each for each in running}
                for pid in found.keys() - self._ranks.keys():
                    self._ranks[pid] = None
                    threading.Thread(target=self._join, args=(settings, found[pid]), daemon=True).start()
                for pid in self._ranks.keys() - found.keys():
                    self._leave(pid, "")
                self._ended.wait(_SEARCH_SECONDS)
        except (DistError, OSError, ValueError) as error:
            print_error(f"not observed: {error}")

    def end(self, reasons: Mapping[int, str]) -> None:
        """Leave, with the reasons of processes that have failed; a gateway that this process has started may stay."""
        self._ended.set()
        for pid in list(self._ranks):
            self._leave(pid, reasons.get(pid, ""))
        if self._locator is not None:
            self._locator.close()

    def _join(self, settings: Settings, found: RankProcess) -> None:
        assert self._locator is not None
        try:
            rank = ObservedRank(settings, self._locator.find, self._locator.bind_host, found)
            if found.pid in self._ranks:
                self._ranks[found.pid] = rank
            else:
                rank.leave("")  # the process has ended meanwhile
        except (DistError, OSError, ValueError) as error:
            print_error(f"rank {found.rank} is not observed: {error}")
            return
        if self._ranks.get(found.pid) is not None and found.rank == 0:
            url = self._locator.find()
            print_error(
                f"this observer watches job {settings.job}: 'rankmesh diagnose --gateway {url}' reports a stuck rank"
            )

    def _leave(self, pid: int, reason: str) -> None:
        rank = self._ranks.pop(pid)
        if rank is not None:
            rank.leave(reason)


def _located(gateway: str, job: str, settings: Settings) -> tuple[GatewayLocator, Settings]:
    """Return where the gateway is, or is started, and the settings with the job's name.

    MASTER_PORT is the program's: the gateway's port follows from it, or from the launcher's job.
    """
    launcher, rank = settings.launcher, settings.rank
    name = settings.job if settings.names_job else ""
    if launcher is not None and rank is not None:
        name = name or f"observe-{launcher.job() or launcher.port()}"
        settings = replace(settings, master_port=None)
        settings = with_master_address(settings, launcher)
    elif rank is not None:
        port = FIRST_PORT + zlib.crc32(f"{settings.master_addr}:{settings.master_port}".encode()) % PORTS
        name, settings = name or f"observe-{port}", replace(settings, master_port=port)
    else:
        name, rank = name or f"observe-{os.getpid()}", 0
        settings = replace(settings, master_addr=LOOPBACK, master_port=0)
    settings = replace(settings, job=job or name)
    if url := gateway or settings.gateway:
        parts = urlsplit(url)
        return KnownGateway(url, parts.hostname or LOOPBACK, parts.port or 0, settings), settings
    return TcpLocator(settings.master_addr or LOOPBACK, settings.master_port or 0, rank, settings), settings
