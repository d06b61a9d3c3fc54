"""Session: one membership of this process in a job, from the join to the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rankmesh._launcher.failure_file import FailureReport
from rankmesh._session import process_exit
from rankmesh._session.backend import Backend, BackendOptions, Engines
from rankmesh._session.callbacks import FailureCallbacks
from rankmesh._session.debug import DebugLevel, get_debug_level
from rankmesh._session.process_exit import ProcessExit
from rankmesh._session.process_group import Group, ProcessGroup
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.wire.errors import DistBackendError, DistError
from rankmesh_agent.wire.goodbye import Goodbye

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh._stores.commands import AgentStore as Store
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.group.communicator import Communicator
    from rankmesh_agent.remote.agent import RemoteAgent

_not_initialized = "the default process group has not been initialized; call init_process_group() first"
"""Why there is no default session."""


_DESTROYED = Goodbye("it called destroy_process_group")


class Session:
    """The agent, process groups, and store of one init_process_group.

    Attributes:
        joined_for_store: whether the session was joined to provide torch's store, and ends with torch's group.
    """

    joined_for_store = False
    failure_file = token = ""

    def __init__(self, agent: Agent | RemoteAgent, rendezvous: Rendezvous, engines: Engines, pg_options: Any) -> None:
        self.agent = agent
        self.rendezvous = rendezvous
        self.engines = engines
        self.pg_options = pg_options
        self.groups: list[ProcessGroup] = []
        self.group = ProcessGroup(agent.world, engines)
        self.callbacks = FailureCallbacks(agent)
        self._use_backend(agent.world, engines.host, pg_options)

    def new_group(
        self, ranks: Sequence[int], timeout: float, engines: Engines | None, pg_options: Any, description: str
    ) -> ProcessGroup:
        """Make a group of these ranks of the mesh, this one among them."""
        world = self.group._communicator
        comm = self.agent.new_group(ranks, timeout, tuple(world.ranks.index(rank) for rank in ranks))
        engines = engines or self.engines
        self._use_backend(comm, engines.host, pg_options)
        group = ProcessGroup(comm, engines, description)
        self.groups.append(group)
        return group

    def drop_group(self, group: ProcessGroup, how: Goodbye = _DESTROYED) -> None:
        """End a group at this rank."""
        self.groups = [other for other in self.groups if other is not group]
        if group._communicator.gpus is not None:
            group._communicator.gpus.end(in_order=how.failure is None)
        self.agent.drop_group(group._communicator, how)

    def shrink(
        self, old: ProcessGroup, remaining: Sequence[int], excluded: Sequence[int], pg_options: Any
    ) -> ProcessGroup:
        """Make a group of the remaining ranks of the mesh in place of a group; see shrink_group.

        All groups end with the default group. ``excluded`` are group ranks of ``old``.
        """
        comm = old._communicator
        named = tuple(comm.global_ranks[rank] for rank in excluded)
        reason = f"it called shrink_group({list(excluded)}) on group {comm.name!r}"
        how = Goodbye(reason, failure=self._failure_of(comm, excluded, named), ranks=named)
        # Before the new group is made: its members may wait for this rank in any of these.
        for group in [self.group, *self.groups] if old is self.group else [old]:
            self.drop_group(group, how)
        shrunk = self.new_group(remaining, comm.timeout, old._engines, pg_options, old._description)
        if old is self.group:
            self.groups, self.group = [], shrunk
            self.agent.set_world(shrunk._communicator)  # type: ignore[arg-type]  # the agent made it
        return shrunk

    def grow(self, world_size: int, seconds: float) -> ProcessGroup:
        """Make a larger world in place of the default group; see grow_group."""
        from rankmesh._stores.commands import move_stores

        larger = self.agent.grow(world_size, seconds)
        with lock, interrupts_deferred():
            if self not in _sessions:  # destroy_process_group, in another thread
                larger.close("its process group was destroyed while it grew")
                raise DistBackendError("grow_group() has ended: the process group was destroyed meanwhile")
            before, self.agent = self.agent, larger
            groups, self.groups = [self.group, *self.groups], []
            self.group = ProcessGroup(larger.world, self.engines)
            move_stores(before, larger)
            self.callbacks.follow(larger)
            for group in groups:
                if group._communicator.gpus is not None:
                    group._communicator.gpus.end(in_order=True)
            if before is not larger:
                before.close(exit_text="it called grow_group")
        self._use_backend(larger.world, self.engines.host, self.pg_options)
        return self.group

    def _failure_of(self, comm: Communicator, excluded: Sequence[int], named: Sequence[int]) -> DistError | None:
        """Return the failure that names a rank to be excluded, None if there is none."""
        found = (
            comm.failure,
            sys.exception(),
            self.agent.failure_naming(named),
            comm.peer_lost_error(excluded, "shrink_group"),
        )
        return next(
            (error for error in found if isinstance(error, DistBackendError) and set(error.ranks).intersection(named)),
            None,
        )

    def _use_backend(self, comm: Communicator, backend: str, pg_options: Any) -> None:
        """Install MPI, or a registered backend, in a new group; the group ends if that fails."""
        if backend == "mesh":
            return
        try:
            if backend == "mpi":
                self.agent.use_mpi(comm, compare_calls=get_debug_level() is DebugLevel.DETAIL)
            else:
                engine = Backend._creators[backend](self._backend_options(comm), pg_options)
                comm.use_custom_backend(backend, engine)
        except BaseException as error:
            comm.abort(error)
            self.agent.drop_group(comm)
            raise

    def _backend_options(self, comm: Communicator) -> BackendOptions:
        from rankmesh._stores import PrefixStore

        store = self.store.clone()  # with a timeout of its own
        store.set_timeout(comm.timeout)
        return BackendOptions(
            PrefixStore(f"group/{comm.id:016x}", store),
            comm.rank,
            comm.size,
            timedelta(seconds=comm.timeout),
            comm.name,
            list(comm.global_ranks),
        )

    @cached_property
    def store(self) -> Store:
        """The job's own store, with the default group's timeout."""
        from rankmesh._stores import AgentStore
        from rankmesh._stores.methods import timedelta_of

        return AgentStore(self.agent, timedelta_of(self.group._communicator.timeout))

    def close(self, end: ProcessExit) -> None:
        """Leave the job; the other ranks' errors report how this process ends."""
        with contextlib.ExitStack() as steps:  # all are taken, also if Ctrl-C ends one; the last is the first here
            steps.callback(self.rendezvous.close)
            steps.callback(self.callbacks.close)
            how = {"exit_text": end.exit_text, "place": end.place}
            steps.callback(self.agent.close, end.reason, raised=end.raised, **how)
            steps.callback(self._report_failure, end.place)
            if end.error is not None:
                steps.callback(self.agent.record_failure, self.group._communicator, end.error)
            if "store" in vars(self):
                steps.callback(self.store.close)
            for group in [self.group, *self.groups]:
                if group._communicator.gpus is not None:
                    steps.callback(group._communicator.gpus.end, in_order=not end.reason)

    def _report_failure(self, place: str) -> None:
        """Report to the launcher which other ranks' failures have ended this one, and at which line."""
        if self.failure_file and ((failed_ranks := self.agent.failed_ranks) or place):
            FailureReport(self.agent.member.rank, os.getpid(), failed_ranks, place).write(self.failure_file)


_default: Session | None = None
_sessions: list[Session] = []
"""All sessions of this process: the default one, and those of other process groups of torch."""
lock = threading.RLock()
"""Held while the default session is made or replaced."""


def join(
    rendezvous: Rendezvous, settings: Settings, timeout: float, engines: Engines | None = None, pg_options: Any = None
) -> Session:
    """Join a job; anything hosted for it ends if that fails. The session ends with the process."""
    from rankmesh._session.agents import agent_for

    settings = replace(settings, job=rendezvous.job)
    if settings.failure_file:
        from rankmesh._launcher.tracebacks import fold_tracebacks

        fold_tracebacks()
        atexit.unregister(process_exit.skip_collection)
        atexit.register(process_exit.skip_collection)
    engines = engines or Engines()
    began = time.monotonic()
    try:
        agent = agent_for(rendezvous, settings, timeout)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            waited = f"{time.monotonic() - began:.0f} s of waiting for job {settings.job!r} to begin"
            error.args = (f"interrupted after {waited}",)
        rendezvous.close()
        raise
    try:
        session = Session(agent, rendezvous, engines, pg_options)
    except BaseException as error:
        agent.close(f"its backend {engines.host!r} could not be made: {type(error).__name__}: {error}"[:500])
        rendezvous.close()
        raise
    session.failure_file, session.token = settings.failure_file, settings.job_token
    if not _sessions:
        atexit.register(leave_at_exit)
    _sessions.append(session)
    return session


def current() -> Session | None:
    """Return the default session, None before init_process_group."""
    return _default


def adopt(session: Session) -> None:
    """Make a session the default one, unless there is one."""
    global _default
    with lock:
        _default = _default or session


def leave(session: Session) -> None:
    """Leave a job. Does nothing if the session has ended."""
    global _default
    with lock:
        if session not in _sessions:
            return
        if session is _default:
            _default = None
        _sessions.remove(session)
        if not _sessions:
            atexit.unregister(leave_at_exit)
    session.close(process_exit.at_destroy(sys.exception()))


def require_session() -> Session:
    """Return the default session; ValueError before init_process_group."""
    if _default is None:
        raise ValueError(_not_initialized)
    return _default


def communicator_of(group: Group) -> Communicator:
    """Return a group's communicator for arrays in host memory; TypeError for anything but a group of this process."""
    if group is None:
        if _default is None:
            raise ValueError(_not_initialized)
        return _default.group._communicator
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup from new_group(), got {type(group).__qualname__}")
    return group._communicator


def leave_at_exit() -> None:
    """Leave all jobs for a script that ends without destroy_process_group; report how it ended.

    Does nothing the second time.
    """
    try:
        end = process_exit.at_exit()
        with contextlib.ExitStack() as steps:  # all are taken, also if Ctrl-C ends one
            for session in _take_all():
                steps.callback(session.close, end)
    except KeyboardInterrupt:  # Python would print its traceback, and go on
        print("rankmesh: interrupted while it left the job", file=sys.stderr)


def _forget_after_fork() -> None:
    """Forget the parent's sessions: a forked child is not a rank, and must not send anything for its parent."""
    global _not_initialized
    atexit.unregister(leave_at_exit)
    reset_lock(lock)
    if _default is not None:
        _not_initialized = (
            f"this process was forked from rank {_default.agent.member.rank}, process {os.getppid()}, which has the "
            "process groups: make the call there, or call init_process_group() here to join another job"
        )
    for session in _take_all():
        # For good, the child's end included: to let go of objects that use a GPU would be a call to CUDA, which a
        # forked child must not make.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        session.agent.end_in_child()


def _take_all() -> list[Session]:
    """Empty the list of sessions; return those that were in it."""
    global _default, _sessions
    sessions, _sessions, _default = _sessions, [], None
    return sessions


os.register_at_fork(after_in_child=_forget_after_fork)
