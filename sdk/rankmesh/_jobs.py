"""``rankmesh.run``: a function as several ranks on this host, and the job that they are."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from rankmesh_agent.config.launched import recorded, unlaunched

if TYPE_CHECKING:
    from rankmesh._cli.client import ServiceClient
    from rankmesh._cli.tables import Table
    from rankmesh._launcher.plan import Plan

R = TypeVar("R")


@overload
def run(fn: Callable[..., R], nprocs: int, /, *args: Any, block: Literal[True] = True) -> list[R]: ...
@overload
def run(fn: Callable[..., R], nprocs: int, /, *args: Any, block: Literal[False]) -> Job[R]: ...
def run(fn: Callable[..., R], nprocs: int, /, *args: Any, block: bool = True) -> list[R] | Job[R]:
    """Call ``fn(*args)`` in ``nprocs`` new processes on this host; return the results, in the order of the ranks.

    The processes have the environment that ``rankmesh run`` gives to ranks, so ``init_process_group()`` needs no
    arguments in ``fn``. The gateway is in this process. Ctrl-C ends the ranks.

    Args:
        fn: importable, so defined at the top level of a module. One that is defined in a notebook or an interactive
            session is sent by value, together with ``args``, which needs cloudpickle.
        nprocs: number of ranks.
        args: picklable, as are the results.
        block: wait for the results; else return the Job at once.

    Raises:
        ProcessRaisedException: of rankmesh.multiprocessing: a rank raised an exception; names the rank and the line,
            and has the traceback. If several did, it is that of the rank that the errors of the others name.
        ProcessExitedException: a rank exited with a code other than 0, or a signal ended it.
        TypeError: ``fn`` is not callable or cannot be sent by value.
        ValueError: ``nprocs`` is less than 1, or a setting in the environment is invalid.
    """
    job = Job(fn, nprocs, args)
    return job.result() if block else job


class Job(Generic[R]):
    """The ranks of ``run(..., block=False)``; in a notebook it shows each rank's state, where it is, and the verdict.

    Attributes:
        name: the job's name.
        url: the gateway's URL, for the option ``--gateway`` of ``rankmesh stacks`` and other commands.
        token: the token that they need, as RANKMESH_TOKEN.
    """

    def __init__(self, fn: Callable[..., R], nprocs: int, args: tuple[Any, ...]) -> None:
        from rankmesh import multiprocessing
        from rankmesh._launcher.arguments import parse
        from rankmesh._launcher.child import ByValue, importable
        from rankmesh._launcher.gateway import LauncherGateway
        from rankmesh._launcher.plan import plan
        from rankmesh_agent.config.settings import Settings
        from rankmesh_agent.net.sockets import bind

        if not callable(fn):
            raise TypeError(f"fn must be a function, got {type(fn).__qualname__}")
        options = replace(
            parse(["--no-python", sys.executable], environ={}), nproc=nprocs, name=getattr(fn, "__name__", "run")
        )
        job = plan(options, Settings.from_env(unlaunched(os.environ)))
        listener = bind(options.master_addr, 0, purpose="this process hosts the gateway")
        job = replace(job, port=listener.getsockname()[1])
        self.name, self.url, self.token = job.job, job.url, job.token
        self._gateway = LauncherGateway(job, listener)
        self._results = [os.memfd_create("rankmesh-result") for _ in range(nprocs)]
        paths = [f"/proc/{os.getpid()}/fd/{each}" for each in self._results]
        self._found = list[bytes]()
        self._ended = False
        threads = "OMP_NUM_THREADS" not in os.environ and nprocs > 1  # NumPy reads it when it is imported
        try:
            self._gateway.start(lambda: None)
            if threads:
                os.environ["OMP_NUM_THREADS"] = "1"
            call = importable(functools.partial(fn, *args))
            rank = _Rank(call, job, paths, "cloudpickle" if isinstance(call, ByValue) else "pickle")
            context = multiprocessing.start_processes(rank, nprocs=nprocs, join=False)
        except BaseException:
            self._close()
            raise
        finally:
            if threads:
                with contextlib.suppress(KeyError):  # another thread has called run(), too
                    del os.environ["OMP_NUM_THREADS"]
        assert context is not None, "it was not joined"
        self._context = context

    def result(self, timeout: float | None = None) -> list[R]:
        """Wait until all ranks have ended; return what ``fn`` returned, in the order of the ranks.

        After a failure the other ranks are ended. Ctrl-C ends all.

        Args:
            timeout: seconds to wait; None without limit.

        Raises:
            TimeoutError: ranks still run when the timeout expires.
            Exception: as for run.
        """
        from rankmesh.multiprocessing import ProcessException
        from rankmesh_agent.net.deadline import Deadline

        deadline = None if timeout is None else Deadline(timeout)
        try:
            while not self._context.join(None if deadline is None else deadline.remaining()):
                if deadline is not None and deadline.expired():
                    raise TimeoutError(f"after {timeout:g} s ranks of job {self.name} still run: {self.verdict()}")
        except TimeoutError:
            raise
        except BaseException as error:
            self._close()
            if isinstance(error, ProcessException):
                failure = self._context._failures.errors().get(error.error_index)
                place = f" at {failure.place}" if failure is not None and failure.place else ""
                error.msg = error.msg.replace("process", "rank", 1).replace(" raised:", f" raised{place}:", 1)
                error.args = (error.msg,)
            raise
        self._close()
        if b"" in self._found:
            raise RuntimeError(f"rank {self._found.index(b'')} of job {self.name} exited before its function returned")
        return [pickle.loads(each) for each in self._found]

    def verdict(self) -> str:
        """Return what ``rankmesh diagnose`` says: which rank holds up the others, and where; or that none does."""
        from rankmesh._cli.diagnose import report

        if self._ended or not any(each.is_alive() for each in self._context.processes):
            return "all ranks have ended"
        with self._service() as service:
            return report(service, "no rank has called init_process_group")

    def stop(self) -> None:
        """End the ranks: by SIGTERM, and after 30 seconds by SIGKILL."""
        self._context._end(signal.SIGTERM)
        self._close()

    def __repr__(self) -> str:
        from rankmesh._cli.tables import lines

        return lines([self._table()]) + self.verdict()

    def _repr_html_(self) -> str:
        table = self._table()
        rows = [[column.lstrip(">") for column in table.columns], *table.rows]
        cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table>{cells}</table><pre>{html.escape(self.verdict())}</pre>"

    def _table(self) -> Table:
        from rankmesh._cli.exit_codes import CommandError
        from rankmesh._cli.options import PATIENCE
        from rankmesh._cli.overview import fetch_snapshots
        from rankmesh._cli.tables import Table
        from rankmesh._cli.top import doing_of

        found: dict[int, Any] = {}
        if not self._ended:
            with self._service() as service, contextlib.suppress(CommandError):  # no rank has joined
                found = {each["rank"]: each for each in fetch_snapshots(service, "", PATIENCE)}
        rows = []
        for rank, process in enumerate(self._context.processes):
            details, code = found.get(rank), process.exitcode
            state = "ended" if code == 0 else f"exit code {code}" if code else details["state"] if details else "runs"
            where = (doing_of(details)[1], details["place"]) if details and code is None else ()
            rows.append([str(rank), str(process.pid), state, ", ".join(dict.fromkeys(filter(None, where)))])
        return Table(f"Job {self.name}", [">rank", ">pid", "state", "at"], rows)

    def _service(self) -> contextlib.closing[ServiceClient]:
        from rankmesh._cli.client import ServiceClient

        return contextlib.closing(ServiceClient("gateway", self.url, self.token))

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._gateway.stop()
            self._found = []
            for each in self._results:
                with open(each, "rb") as file:
                    self._found.append(file.read())


class _Rank:
    """The function, as each process calls it."""

    def __init__(self, call: Callable[[], Any], plan: Plan, results: list[str], pickler: str) -> None:
        self._call, self._plan, self._results, self._pickler = call, plan, results, pickler

    def __call__(self, rank: int) -> None:
        environment = recorded(self._plan.environment(rank, os.environ))
        for name in {*os.environ, *environment}:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]
        result = self._call()
        with open(self._results[rank], "wb") as file:
            importlib.import_module(self._pickler).dump(result, file)
