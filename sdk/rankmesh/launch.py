"""The launcher: ``rankmesh run`` with torchrun's arguments, or ``python -m rankmesh.launch``, torch's older form.

The older form passes ``--local-rank=LOCAL_RANK`` as the script's first argument unless ``--use-env`` is given; the
environment contains it in both forms.

The launcher starts one process a rank, hosts the job's gateway at MASTER_ADDR:MASTER_PORT (on node 0), prefixes every
line of output with its rank, and terminates all ranks after a failure, with a report of its cause: the rank that the
others' errors name, which need not be the first to exit, and its last output. With ``--max-restarts`` all ranks then
start again, in a new epoch of the job; with ``--nnodes MIN:MAX`` also when a node joins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import rankmesh_agent.config.linux  # noqa: F401  # checks the platform
from rankmesh._launcher.arguments import parse
from rankmesh._launcher.failure import failure_report, stop_report
from rankmesh._launcher.failure_file import VARIABLE, FailureFile
from rankmesh._launcher.gateway import LauncherGateway
from rankmesh._launcher.output import Outputs
from rankmesh._launcher.plan import Plan, plan, resolve_nodes
from rankmesh._launcher.rank import Rank
from rankmesh._launcher.signals import SignalPipe, pdeathsig
from rankmesh._launcher.supervisor import Supervisor
from rankmesh_agent.config.launched import recorded, unlaunched
from rankmesh_agent.config.settings import Settings, protection, require_token_beyond_loopback
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import is_exhausted, raise_limit, reason
from rankmesh_agent.net.inherited import print_line, reset_inherited
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.net.tls import check_environment
from rankmesh_agent.shared_memory.orphans import remove_orphans
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.printable import printable_lines
from rankmesh_agent.wire.schemas import NO_NODE

if TYPE_CHECKING:
    from rankmesh._launcher.node_rendezvous import NodeRendezvous

_GOODBYE_SECONDS = 4.0
"""Time limit for the launchers of other nodes to learn that the job is over."""
_POLL_SECONDS = 0.05


class _RunResult(NamedTuple):
    """The end of an attempt; ``failed``: a rank of this node has; ``stopped``: no restart can follow."""

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
    reset_inherited()
    options = parse(argv, prog=prog, use_env=use_env)
    restore_limit = raise_limit()
    try:
        settings = Settings.from_env(unlaunched(os.environ))
        check_environment(server=True)
        options = resolve_nodes(options, settings)
        job = plan(options, settings)
        listener = _listen(job, settings)
    except (ValueError, DistNetworkError) as error:
        return _refuse(error)
    if listener is None:
        return _launch(job, None, restore_limit, settings)
    job = dataclasses.replace(job, port=listener.getsockname()[1])
    gateway = LauncherGateway(job, listener)
    try:
        return _launch(job, gateway, restore_limit, settings)
    finally:
        gateway.stop()
        remove_orphans(settings.shm_dir)


def _listen(job: Plan, settings: Settings) -> socket.socket | None:
    """Return the gateway's socket, at the master address or RANKMESH_BIND; None if the gateway is elsewhere."""
    options, purpose = job.options, "the launcher hosts the gateway"
    if options.external_gateway or options.node_rank > 0:
        return None
    host = settings.bind if settings.bind and not job.owns_job else options.master_addr
    require_token_beyond_loopback(host, job.token, "the launcher's gateway")
    if options.node_rank == NO_NODE:
        try:
            probe = bind(options.master_addr, job.port, purpose=purpose)
        except DistNetworkError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return None
            raise
        if not settings.bind:
            return probe
        probe.close()
    return bind(host, job.port, purpose=purpose)


def _launch(job: Plan, gateway: LauncherGateway | None, restore_limit: Callable[[], None], settings: Settings) -> int:
    """Start the ranks and supervise them; start all of them again as often as the options allow."""
    try:
        outputs = Outputs(job.options.logs, job.job)
    except ValueError as error:
        return _refuse(error)
    with SignalPipe() as inbox, contextlib.ExitStack() as cleanup:
        rendezvous = None
        options = job.options
        restarts_all = options.max_restarts > 0 and not options.replace
        if not job.owns_job and (restarts_all or options.min_nodes < options.nnodes):
            from rankmesh._launcher.node_rendezvous import NodeRendezvous

            if gateway is not None:
                gateway.start(inbox.wake)
            rendezvous = NodeRendezvous(job.heartbeat(hosts_gateway=gateway is not None), job.url, job.token)
            cleanup.callback(rendezvous.close)
            cleanup.callback(_end_rendezvous, rendezvous, gateway, inbox)
        end, restarts = None, 0
        while True:
            if rendezvous is not None:
                joined = _join(job, rendezvous, gateway, inbox, settings.timeout, end)
                if isinstance(joined, int):
                    return joined
                job = joined
            if job.attempt and gateway is not None:
                gateway.restart(job.attempt)
            if end is None:
                lines = _greeting(job, outputs.directory)
            else:
                remove_orphans(settings.shm_dir)
                lines = _restarted(job, failed=job.restarts > restarts)
            restarts = job.restarts
            end = _run_attempt(job, gateway, rendezvous, restore_limit, outputs, inbox, lines)
            if end.stopped or not _continues(job, end, rendezvous):
                return end.status
            if gateway is not None:
                gateway.end_attempt()
            job = dataclasses.replace(job, attempt=job.attempt + 1, restarts=job.restarts + 1)


def _join(
    job: Plan,
    rendezvous: NodeRendezvous,
    gateway: LauncherGateway | None,
    inbox: SignalPipe,
    timeout: float,
    end: _RunResult | None,
) -> Plan | int:
    """Wait for the nodes of the next attempt; return the plan of this node's ranks, or without one the exit code."""
    from rankmesh._launcher.node_rendezvous import RendezvousError

    deadline = Deadline(timeout)
    while True:
        try:
            place = rendezvous.join(deadline, _say, inbox.fd)
        except RendezvousError as error:
            status = _refuse(error)
            return status if end is None else end.status or 1
        if place is not None:
            return dataclasses.replace(
                job, attempt=place.attempt, restarts=place.restarts, node=place.node, nodes=place.nodes
            )
        if received := inbox.read():
            return 128 + received[0]
        if gateway is not None and (why := gateway.failure()):
            _refuse(why)
            return 1
        if rendezvous.latest.over:
            why = f": {rendezvous.latest.reason}" if rendezvous.latest.failed else ""
            _say(f"the job is over{why}")
            return int(rendezvous.latest.failed) if end is None else end.status


def _run_attempt(
    job: Plan,
    gateway: LauncherGateway | None,
    rendezvous: NodeRendezvous | None,
    restore_limit: Callable[[], None],
    outputs: Outputs,
    inbox: SignalPipe,
    announced: list[bytes],
) -> _RunResult:
    """Start the ranks, the first time also the gateway; supervise the ranks; report their failures."""
    messages = outputs.writers[1]
    with contextlib.ExitStack() as cleanup:
        try:
            failures = FailureFile()
            cleanup.callback(failures.close)
            starter = _Starter(job, outputs, failures.path, cleanup, restore_limit)
            ranks = [starter.start(number) for number in job.ranks]
        except OSError as error:
            why = reason(error) if is_exhausted(error) else error
            return _RunResult(_refuse(f"cannot start {job.options.program[0]}: {why}"), failed=False, stopped=True)
        messages.write_lines(announced)
        # Not earlier: a process that forks should have no busy threads. The backlog holds clients until now.
        if gateway is not None:
            gateway.start(inbox.wake)
        supervisor = Supervisor(ranks, outputs.writers, inbox, job.options, failures, rendezvous)
        if job.options.replace:
            supervisor.replace = starter.replace
        if gateway is not None:
            supervisor.on_exit = gateway.report_exit
            supervisor.elsewhere = gateway.ranks
            supervisor.broken = gateway.failure
        supervisor.run()
        failure = supervisor.failure()
        messages.write_lines(stop_report(ranks) if failure is None else failure_report(failure, ranks))
        supervisor.flush()
        return _RunResult(supervisor.status, failed=failure is not None, stopped=supervisor.signal is not None)


def _continues(job: Plan, end: _RunResult, rendezvous: NodeRendezvous | None) -> bool:
    """Return whether another attempt may follow one that has ended."""
    if rendezvous is not None:
        rendezvous.settle()
        if rendezvous.is_over:
            return False
        if rendezvous.is_outdated:
            return True
    return end.failed and job.restarts < job.options.max_restarts and not job.options.replace


def _end_rendezvous(rendezvous: NodeRendezvous, gateway: LauncherGateway | None, inbox: SignalPipe) -> None:
    """Report that this launcher ends; the one with the gateway waits until the others know that the job is over."""
    if not rendezvous.is_over:
        rendezvous.report("stopped")
        rendezvous.settle()
    deadline = Deadline(_GOODBYE_SECONDS)
    while gateway is not None and not gateway.all_know_end() and not deadline.expired():
        if select.select([inbox.fd], [], [], _POLL_SECONDS)[0]:
            return


class _Starter:
    """Starts ranks of this node; ``cleanup`` releases them."""

    def __init__(
        self,
        job: Plan,
        outputs: Outputs,
        failure_file: str,
        cleanup: contextlib.ExitStack,
        restore_limit: Callable[[], None],
    ) -> None:
        self._job = job
        self._outputs = outputs
        self._failure_file = failure_file
        self._cleanup = cleanup
        self._restore_limit = restore_limit
        self._tie = pdeathsig()
        self._replaced = 0

    def start(self, number: int, **variables: str) -> Rank:
        """Start a rank, with more variables in its environment."""
        job = self._job
        rank = Rank(
            number,
            job.command(number),
            recorded({**job.environment(number, os.environ), VARIABLE: self._failure_file, **variables}),
            stdin=None if self._reads_stdin(number) else subprocess.DEVNULL,
            outputs=self._outputs.of_rank(number - job.ranks.start, job.attempt),
            before_exec=self._before_exec,
        )
        self._cleanup.callback(rank.release)
        return rank

    def _reads_stdin(self, number: int) -> bool:
        debugged = self._job.options.pdb
        return number == debugged if debugged is not None else number == self._job.ranks.start or os.isatty(0)

    def replace(self, rank: Rank) -> tuple[Rank, str] | None:
        """Start a process in place of a rank that has failed; return it with a remark, None if there is none left."""
        most = self._job.options.max_restarts
        if self._replaced == most:
            return None
        self._replaced += 1
        try:
            return self.start(rank.number, RANKMESH_JOIN="1"), f"replacement {self._replaced} of {most}"
        except OSError as error:
            _say(f"no process can take the place of rank {rank.number}: {error}")
            return None

    def _before_exec(self) -> None:
        self._tie()
        self._restore_limit()


def _restarted(job: Plan, *, failed: bool) -> list[bytes]:
    who = "the rank starts" if job.world_size == 1 else f"all {job.world_size} ranks start"
    where = ""
    if job.options.min_nodes < job.options.nnodes:
        where = f" on {job.nodes} node{'s' * (job.nodes > 1)}; this is node {job.node}"
    count = f"restart {job.restarts} of {job.options.max_restarts}: " if failed else ""
    return [f"[rankmesh] {count}{who} again{where}".encode()]


def _greeting(job: Plan, log_directory: str) -> list[bytes]:
    who = "1 rank" if len(job.ranks) == 1 else f"{len(job.ranks)} ranks"
    where = "" if job.owns_job else f" on node {job.node} of {job.nodes}"
    greeting = f"{who}{where}, gateway {job.url} (curl {job.url}/health), {protection(job.token)}"
    lines = [greeting, *job.options.remarks]
    if log_directory:
        lines.insert(1, f"output files in {log_directory}")
    if sys.stdout.isatty():
        lines[0] += "; 'rankmesh dashboard' prints a link to its dashboard"
    return [f"[rankmesh] {line}".encode() for line in lines]


def _say(text: str) -> None:
    print_line(f"[rankmesh] {printable_lines(text)}", sys.stderr)


def _refuse(reason: object) -> int:
    print_line(f"rankmesh run: {printable_lines(str(reason))}", sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(prog="python -m rankmesh.launch", use_env=False))
