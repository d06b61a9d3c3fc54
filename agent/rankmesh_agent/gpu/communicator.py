"""Communicator for arrays on GPUs: calls join the group's call queue and run on a backend for GPUs."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.launch import EventPool, Launch, LaunchedWork
from rankmesh_agent.gpu.nccl import NcclBackend, reduction
from rankmesh_agent.gpu.watchdog import GpuWatchdog
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call, ReduceOp

Array = np.ndarray[Any, Any]
_log = logging.getLogger("rankmesh")
_DEVICE_TYPE = "cuda"
_KEY_DEFAULTS = (None, None, 0, None, None, None, "")
"""Values of the fields that a call's key may leave out: see Call."""


class GpuCommunicator(Communicator):
    """One rank's calls on arrays on GPUs, beside those of the same group on arrays in host memory.

    A synchronous call is enqueued on the caller's current stream, and returns. An asynchronous call is enqueued on a
    stream of the group's own, which first waits for the work that the current stream has by then.
    """

    on_device = True

    def __init__(self, host: Communicator, backend: NcclBackend) -> None:
        super().__init__(host.id, host.name, host.ranks, host.ranks[host.rank], host.timeout)
        self._host = host
        self.state, self.queue = host.state, host.queue
        self.gpu_backend = backend
        self.submit = self._submit_one
        self._events = EventPool()
        self._streams: dict[tuple[int, str], int] = {}
        self._peers = [rank for rank in range(host.size) if rank != host.rank]
        self._watchdog = GpuWatchdog(host, backend)
        self._queued: Work | None = None  # the launch of the latest asynchronous call
        self._streams_lock = threading.Lock()
        self._connect_lock = threading.Lock()
        self._messages_lock = threading.RLock()
        self._batched: list[_Message] | None = None
        self._closed = self._warned = False

    def for_reduction(self, dtype: np.dtype[Any], op: ReduceOp) -> Communicator:
        """See Communicator: reductions that NCCL lacks are those of arrays in host memory, with one warning."""
        if reduction(dtype, op) is not None:
            return self
        if not self._warned and self.rank == 0:
            what, name = f"{op.name} of {display(dtype)}", self.name
            _log.warning("%s on GPUs goes through host memory in group %r: NCCL does not have it", what, name)
        self._warned = True
        return self._host

    # Collectives

    def _submit_one(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> Work | None:
        """Make a call whose arrays are DeviceArrays: see CallQueue.submit."""
        key, description = _on_gpus(key)
        arrays = _device_arrays(arguments, description)
        launch = self._new_launch(description, arrays, options, self._peers)
        if not self.gpu_backend.is_connected(launch.device):
            with self._connect_lock:
                self.gpu_backend.connect_all(launch)
        launch_options = options
        if options.on_complete is not None or options.result:  # both are the launch's
            launch_options = options._replace(on_complete=None, result=[])
        arguments = launch, _watched(self, self._watchdog, launch), *arguments
        queued = self.queue.submit(key, arguments, launch_options, launches=True)
        if not options.async_op:
            return None
        self._queued = queued
        return LaunchedWork(launch, queued, options.result, self._watchdog.future_of)

    def _new_launch(
        self, description: str, arrays: Sequence[DeviceArray], options: Options, peers: Sequence[int], purpose: str = ""
    ) -> Launch:
        """Return a launch on the caller's current stream, for an asynchronous call on one of the group's own."""
        # There is one such stream for collectives, and one for the messages to, and from, each peer: on a shared stream
        # two ranks could both send first, and neither would receive.
        device, streams = arrays[0].device, arrays[0].streams
        for array in arrays[1:]:
            if array.device != device:
                raise ValueError(
                    f"{description}: the arrays are on GPUs {device} and {array.device}; a call works on one"
                )
        stream = streams.current(device)
        if options.async_op:
            stream = self._stream_behind(stream, device, purpose)
        return Launch(description, arrays, stream, options, self._events, peers)

    def _stream_behind(self, stream: int, device: int, purpose: str) -> int:
        """Return the group's own stream for a purpose, made to wait for the work enqueued on another stream."""
        with runtime.DeviceGuard(device), self._streams_lock:
            own = self._streams.get((device, purpose))
            if own is None:
                own = self._streams[device, purpose] = runtime.create_stream()
            event = self._events.acquire(device)
            runtime.record_event(event, stream)
            runtime.stream_wait_event(event, own)
            self._events.release(device, event)  # recording it anew does not change the waits enqueued before
        return own

    def finish(self, timeout: float) -> None:
        """Wait, at most ``timeout`` seconds, until the GPU has completed all calls of the group so far."""
        deadline, queued = Deadline(timeout), self._queued
        if queued is not None:  # calls are launched in order
            try:
                queued.wait(deadline.remaining() or 1e-6)  # 0 would mean no limit
            except DistError:
                if not queued.is_completed():
                    raise
        self._watchdog.drain(deadline)

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self._begin_message("send", array, rank, options)

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        work = self._begin_message("recv", array, rank, options)
        return self.global_ranks[self.ranks.index(rank)] if work is None else work

    def _begin_message(self, op: str, array: Any, rank: int, options: Options) -> LaunchedWork | None:
        failure = self.failure
        if failure is not None:
            raise failure
        peer = self.ranks.index(rank)
        global_rank = self.global_ranks[peer]
        argument = "dst" if op == "send" else "src"
        description = f"{op}({display(array.dtype)}[{array.size}], {argument}={global_rank})"
        launch = self._new_launch(description, [array], options, [peer], f"{op} {peer}")
        with self._messages_lock:
            message = _Message(launch, op, array, peer)
            if self._batched is None:
                self._enqueue_messages([message])
            else:
                self._batched.append(message)
        if not options.async_op:
            return None
        source = global_rank if op == "recv" else None
        return LaunchedWork(launch, None, options.result, self._watchdog.future_of, source)

    @contextlib.contextmanager
    def batch_messages(self) -> Iterator[None]:
        """Enqueue the messages of the block together at its end, so that none waits for another."""
        with self._messages_lock:
            self._batched = []
            try:
                yield
                messages = self._batched
            finally:
                self._batched = None
            if messages:
                self._enqueue_messages(messages)

    def _enqueue_messages(self, messages: Sequence[_Message]) -> None:
        """Enqueue messages together. All ranks connect the pairs in the same order, which rules out a deadlock."""
        launches = [message.launch for message in messages]
        pairs = {(each.peer, self.rank) if each.op == "recv" else (self.rank, each.peer): each for each in messages}
        watched = _watched(self, self._watchdog, *launches)
        with runtime.DeviceGuard(launches[0].device), watched, runtime.cuda_errors("messages between GPUs"):
            for sender, receiver in sorted(pairs):
                launch = pairs[sender, receiver].launch
                with runtime.DeviceGuard(launch.device):
                    self.gpu_backend.connect(launch, sender, receiver)
            with self.gpu_backend.grouped() if len(messages) > 1 else contextlib.nullcontext():
                for launch, op, array, peer in messages:
                    with runtime.DeviceGuard(launch.device):
                        (self.gpu_backend.send if op == "send" else self.gpu_backend.recv)(launch, array, peer)

    # The group's state is that of the host communicator

    @property
    def medium(self) -> str:
        return self.gpu_backend.medium

    @property
    def backend(self) -> str:
        return self.gpu_backend.name

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        return self._host.empty(dtype, count, options)

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        return self._host.peer_lost_error(members, during)

    def close(self) -> None:
        """Abort the calls on GPUs: see ``end``."""
        self.end(in_order=False)

    def end(self, *, in_order: bool) -> None:
        """End the calls on GPUs; calls on host memory go on. Does nothing the second time.

        Args:
            in_order: wait for the calls in flight, up to the group's timeout, instead of aborting them.
        """
        if self._closed:
            return
        self._closed = True
        if in_order:
            with contextlib.suppress(RuntimeError):  # the group has failed; or this is a callback, which cannot wait
                self.finish(self.timeout)
        if self._watchdog.close() or self.failure is not None:
            self.gpu_backend.abort()
        self.gpu_backend.close()
        for (device, _), stream in self._streams.items():
            with runtime.DeviceGuard(device):
                runtime.destroy_stream(stream)
        self._events.close()


@contextlib.contextmanager
def _watched(comm: GpuCommunicator, watchdog: GpuWatchdog, *launches: Launch) -> Iterator[None]:
    """Have launches watched from the start, as only ``abort`` ends a wait in NCCL; raise the failure of a group."""
    for launch in launches:
        watchdog.add(launch)
    try:
        yield
        for launch in launches:
            with runtime.DeviceGuard(launch.device):
                launch.record_end()
    except BaseException as error:
        for launch in launches:
            watchdog.remove(launch)
        failure = comm.failure
        if failure is not None and isinstance(error, Exception):
            raise failure from error
        raise


class _Message(NamedTuple):
    """A message to be enqueued: ``send`` or ``recv``, to or from a group rank."""

    launch: Launch
    op: str
    array: DeviceArray
    peer: int


@functools.lru_cache(1024)
def _on_gpus(key: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """Return the key of a call on GPUs, given that of the same call on the host, and its description."""
    full = (*key, *_KEY_DEFAULTS[len(key) :], _DEVICE_TYPE)
    return full, str(Call(*full))


def _device_arrays(arguments: Sequence[Any], description: str) -> list[DeviceArray]:
    """Return the arrays among the arguments of the call described."""
    found = []
    for argument in arguments:
        if isinstance(argument, DeviceArray):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += argument
    for number, array in enumerate(found):
        if not isinstance(array, DeviceArray):
            raise TypeError(
                f"{description}: array {number} is in host memory, another one on a GPU; all arrays of a call have to "
                "be on one GPU, or all in host memory"
            )
    return found
