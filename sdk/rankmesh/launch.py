"""The launcher: ``rankmesh run`` with torchrun's arguments, or ``python -m rankmesh.launch``, torch's older form.

The older form passes ``--local-rank=LOCAL_RANK`` as the script's first argument unless ``--use-env`` is given; the
environment contains it in both forms.

The launcher starts one process a rank, hosts the job's gateway at MASTER_ADDR:MASTER_PORT (on node 0), prefixes every
line of output with its rank, and terminates all ranks after a failure, with a report of its cause: the rank that the
others' errors name, which need not be the first to exit, and its last output. With ``--max-restarts`` all ranks then
start again, in a new epoch of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rankmesh._launcher.arguments import parse
from rankmesh._launcher.failure_file import VARIABLE, FailureFile
from rankmesh._launcher.gateway import LauncherGateway
from rankmesh._launcher.nodes import resolve_nodes
from rankmesh._launcher.output import TerminalWriter, standard_writers
from rankmesh._launcher.pdeathsig import pdeathsig
from rankmesh._launcher.plan import Plan, plan
from rankmesh._launcher.rank import Rank
from rankmesh._launcher.report import failure_report, stop_report
from rankmesh._launcher.signals import SignalPipe
from rankmesh._launcher.supervisor import Supervisor
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import is_exhausted, raise_limit, reason
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.transports.shared_memory import remove_orphans
from rankmesh_agent.wire.errors import DistNetworkError

if TYPE_CHECKING:
    from rankmesh._launcher.restart_rendezvous import RestartRendezvous

_GOODBYE_SECONDS = 4.0
"""Time limit for the launchers of other nodes to learn that the job is over."""
_POLL_SECONDS = 0.05


class _RunResult(NamedTuple):
    """The end of an attempt.

    Attributes:
        status: the launcher's exit code if this was the last attempt.
        failed: whether a rank of this node has failed.
        stopped: whether no restart can follow: after a signal from the user, or if the ranks cannot be started.
    """

    status: int
    failed: bool
    stopped: bool


def main(argv: list[str] | None = None, *, prog: str = "rankmesh run", use_env: bool = True) -> int:
    """Launch a job and return its exit code after all ranks have ended.

    Args:
        argv: arguments after the program's name; None for this process's.
        prog: the program's name.
        use_env: default of ``--use-env``: whether LOCAL_RANK is passed in the environment only.

    Raises:
        SystemExit: with code 2 if an argument is invalid, with 0 after ``--help``.

    Source: https://pytorch.org/docs/2.1/distributed.html#launch-utility
    """
    options = parse(argv, prog=prog, use_env=use_env)
    restore_limit = raise_limit()
    try:
        settings = Settings.from_env(os.environ)
        options = resolve_nodes(options, settings)
        job = plan(options, settings)
        listener = _listen(job, settings) if options.node_rank == 0 else None
    except (ValueError, DistNetworkError) as error:
        return _refuse(error)
    if listener is None:
        return _launch(job, None, restore_limit, settings.shm_dir)
    job = dataclasses.replace(job, port=listener.getsockname()[1])
    gateway = LauncherGateway(job, listener)
    try:
        return _launch(job, gateway, restore_limit, settings.shm_dir)
    finally:
        gateway.stop()
        remove_orphans(settings.shm_dir)


def _listen(job: Plan, settings: Settings) -> socket.socket:
    """Return the gateway's listening socket: at the master address, or at RANKMESH_BIND on several nodes."""
    host = job.options.master_addr
    if not job.owns_job and settings.bind:
        host = settings.bind
    return bind(host, job.port, purpose="the launcher hosts the gateway")


def _launch(job: Plan, gateway: LauncherGateway | None, restore_limit: Callable[[], None], shm_dir: str) -> int:
    """Start the ranks and supervise them; after a failure start all of them again, as often as the options allow."""
    writers = standard_writers()
    with SignalPipe() as inbox, contextlib.ExitStack() as cleanup:
        rendezvous = None
        if job.options.max_restarts and not job.owns_job:
            from rankmesh._launcher.restart_rendezvous import RestartRendezvous

            rendezvous = RestartRendezvous(job)
            cleanup.callback(rendezvous.close)
            cleanup.callback(_end_rendezvous, rendezvous, gateway, inbox)
            if gateway is None:  # a node that comes back, or comes late, begins where the others are
                rendezvous.ask()
                job = dataclasses.replace(job, attempt=rendezvous.latest)
        announced = _greeting(job)
        while True:
            end = _run_attempt(job, gateway, rendezvous, restore_limit, writers, inbox, announced)
            attempt = _next_attempt(job, end, rendezvous)
            if attempt is None:
                return end.status
            job = dataclasses.replace(job, attempt=attempt)
            announced = [_restarted(job)]
            if gateway is not None:
                gateway.restart(attempt)
            remove_orphans(shm_dir)


def _run_attempt(
    job: Plan,
    gateway: LauncherGateway | None,
    rendezvous: RestartRendezvous | None,
    restore_limit: Callable[[], None],
    writers: tuple[TerminalWriter, TerminalWriter],
    inbox: SignalPipe,
    announced: list[bytes],
) -> _RunResult:
    """Start the ranks, the first time also the gateway; supervise the ranks; report their failures."""
    messages = writers[1]
    with contextlib.ExitStack() as cleanup:
        try:
            failures = FailureFile()
            cleanup.callback(failures.close)
            ranks = _start_ranks(job, writers, failures.path, cleanup, restore_limit)
        except OSError as error:
            why = reason(error) if is_exhausted(error) else error
            return _RunResult(_refuse(f"cannot start {job.options.program[0]}: {why}"), failed=False, stopped=True)
        messages.write_lines(announced)
        # Not earlier: a process that forks should have no busy threads. The backlog holds clients until now.
        if gateway is not None:
            gateway.start()
        if rendezvous is not None:
            rendezvous.begin(job.attempt)
        supervisor = Supervisor(
            ranks,
            writers,
            inbox,
            failure_grace=job.options.failure_grace,
            stop_grace=job.options.stop_grace,
            failures=failures,
            rendezvous=rendezvous,
        )
        if gateway is not None:
            supervisor.on_exit = gateway.report_exit
            supervisor.elsewhere = gateway.ranks
        supervisor.run()
        failure = supervisor.failure()
        messages.write_lines(stop_report(ranks) if failure is None else failure_report(failure, ranks))
        supervisor.flush()
        return _RunResult(supervisor.status, failed=failure is not None, stopped=supervisor.signal is not None)


def _next_attempt(job: Plan, end: _RunResult, rendezvous: RestartRendezvous | None) -> int | None:
    """Return the number of the restart that follows an attempt, None if there is none."""
    if end.stopped:
        return None
    if rendezvous is not None:
        rendezvous.settle()
        if rendezvous.over:
            return None
        if rendezvous.is_outdated:
            return rendezvous.latest
    return job.attempt + 1 if end.failed and job.attempt < job.options.max_restarts else None


def _end_rendezvous(rendezvous: RestartRendezvous, gateway: LauncherGateway | None, inbox: SignalPipe) -> None:
    """Report that this launcher ends; the one with the gateway waits until the others know that the job is over."""
    if not rendezvous.over:
        rendezvous.report("stopped")
        rendezvous.settle()
    deadline = Deadline(_GOODBYE_SECONDS)
    while gateway is not None and not gateway.all_know_end() and not deadline.expired():
        if select.select([inbox.fd], [], [], _POLL_SECONDS)[0]:
            return


def _start_ranks(
    job: Plan,
    writers: tuple[TerminalWriter, TerminalWriter],
    failure_file: str,
    cleanup: contextlib.ExitStack,
    restore_limit: Callable[[], None],
) -> list[Rank]:
    tie = pdeathsig()

    def before_exec() -> None:
        tie()
        restore_limit()

    ranks = []
    for number in job.ranks:
        rank = Rank(
            number,
            job.command(number),
            {**job.environment(number, os.environ), VARIABLE: failure_file},
            stdin=None if number == job.ranks.start else subprocess.DEVNULL,
            writers=writers,
            before_exec=before_exec,
        )
        cleanup.callback(rank.release)
        ranks.append(rank)
    return ranks


def _restarted(job: Plan) -> bytes:
    who = "the rank starts" if job.world_size == 1 else f"all {job.world_size} ranks start"
    return f"[rankmesh] restart {job.attempt} of {job.options.max_restarts}: {who} again".encode()


def _greeting(job: Plan) -> list[bytes]:
    who = "1 rank" if len(job.ranks) == 1 else f"{len(job.ranks)} ranks"
    where = "" if job.owns_job else f" on node {job.options.node_rank} of {job.options.nnodes}"
    greeting = f"{who}{where}, gateway {job.url} (curl {job.url}/health)"
    return [f"[rankmesh] {line}".encode() for line in (greeting, *job.options.remarks)]


def _refuse(reason: object) -> int:
    print(f"rankmesh run: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(prog="python -m rankmesh.launch", use_env=False))
