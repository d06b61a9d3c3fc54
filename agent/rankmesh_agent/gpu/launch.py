"""Calls enqueued on CUDA streams: their completion events, and the Works that wait for these."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray, Streams
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Future, Work, wait_limit
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError

_NO_FUTURE = Future()
_POLL_SECONDS = 0.0002


class EventPool:
    """CUDA events for reuse: to create one takes longer than to record it. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}

    def acquire(self, device: int) -> int:
        """Return an event of a device, which must be the current one."""
        free = self._free.setdefault(device, [])
        try:
            return free.pop()
        except IndexError:
            return runtime.create_event()

    def release(self, device: int, event: int) -> None:
        """Return an event to the pool; nothing may wait for it any more."""
        self._free[device].append(event)

    def close(self) -> None:
        """Destroy the free events."""
        for events in self._free.values():
            while events:
                runtime.destroy_event(events.pop())


class Launch:
    """One call on one GPU, from its launch until the GPU has completed it.

    Args:
        arrays: the call's arrays, kept alive until it has ended.
        options: of the call; ``on_complete`` enqueues the caller's work behind it, a copy back from a staging array.
        peers: group ranks that the call waits for.

    Attributes:
        ended: whether the call was found to be completed, or has failed.
        future: the future that completes with the call, once one was requested.
        seq, fingerprint: of the collective, the same at all ranks; 0 for a message.
    """

    __slots__ = (
        *("description", "device", "streams", "stream", "deadline", "peers", "error", "future", "seq", "fingerprint"),
        *("_arrays", "_on_complete", "_events", "_event", "_scratch", "ended", "_lock"),
    )

    def __init__(
        self,
        description: str,
        arrays: Sequence[DeviceArray],
        stream: int,
        options: Options,
        events: EventPool,
        peers: Sequence[int],
    ) -> None:
        self.peers = peers
        self.description = description
        self.device = arrays[0].device
        self.streams: Streams = arrays[0].streams
        self.stream = stream
        self.deadline = Deadline(options.timeout)
        self.error: DistError | None = None
        self.future: Future | None = None
        self.seq = self.fingerprint = 0
        self._arrays: Sequence[DeviceArray] | None = arrays
        self._on_complete = options.on_complete
        self._events = events
        self._event: int | None = None
        self._scratch: list[Any] = []
        self.ended = False
        self._lock = threading.Lock()

    @property
    def op(self) -> str:
        """The call's operation: ``all_reduce``, say."""
        return self.description.partition("(")[0]

    def scratch_rows(self, like: DeviceArray, count: int) -> list[DeviceArray]:
        """Return contiguous scratch arrays for use on the stream, each like ``like``; they live as long as the call."""
        memory = runtime.allocate(max(count * like.nbytes, 1), self.stream)
        self._scratch.append(memory)
        whole = DeviceArray(int(memory.ptr), count * like.size, like.dtype, like.device, memory, like.streams)
        return [whole[row * like.size : (row + 1) * like.size] for row in range(count)]

    def record_end(self) -> None:
        """Record the completion event behind all work of the call. In the enqueuing thread, with the device current."""
        if self._on_complete is not None:
            with self.streams.using(self.device, self.stream):
                self._on_complete()
        event = self._events.acquire(self.device)
        runtime.record_event(event, self.stream)  # before it is published: a reused event counts as completed
        with self._lock:
            if not self.ended:
                self._event = event

    def is_completed(self) -> bool:
        """Return whether the GPU has completed the call, or it has failed; a completed call releases what it kept."""
        with self._lock:
            if not self.ended and self._event is not None and self._query(self._event):
                self._complete(self._event)
            return self.ended

    def complete(self) -> None:
        """Release what the call kept: the GPU has completed a later one on the stream, and so this one."""
        with self._lock:
            if not self.ended and self._event is not None:
                self._complete(self._event)

    def _complete(self, event: int) -> None:
        self.ended = True
        self._events.release(self.device, event)
        self._release()

    def _query(self, event: int) -> bool:
        with runtime.DeviceGuard(self.device):  # queried with another device current, CUDA makes a context there
            return runtime.event_completed(event)

    def request_future(self) -> Future:
        """Return a future of the end of the call, which ``complete_future`` completes."""
        with self._lock:
            if self.future is None:
                self.future = Future()
            return self.future

    def complete_future(self) -> None:
        """Complete the future of a call that has ended, if one was requested; a second time changes nothing."""
        if self.future is not None:
            if self.error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(self.error)

    def fail(self, error: DistError) -> None:
        """End the call with an error; its backend has been aborted."""
        with self._lock:
            if self.ended:
                return
            self.error = error
            self.ended = True
            self._release()  # the event is not reused: a stream may still be about to wait for it

    def _release(self) -> None:
        self._event = self._arrays = self._on_complete = None
        self._scratch.clear()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait until the GPU has completed the call."""
        with self._lock:
            if self._event is not None:
                with runtime.DeviceGuard(self.device):
                    runtime.stream_wait_event(self._event, stream)


class LaunchedWork(Work):
    """Work of an asynchronous call on arrays on GPUs. ``wait`` makes the current stream wait, not the host.

    Args:
        queued: the Work of the launch itself, which waits for earlier calls of the group; None if it is launched.
        source: global rank that a message comes from, None for other calls.
    """

    def __init__(
        self,
        launch: Launch,
        queued: Work | None,
        result: list[Any],
        future_of: Callable[[Launch], Future],
        source: int | None = None,
    ) -> None:
        super().__init__(launch.op, result, _NO_FUTURE)  # each request for the future makes one
        self._launch = launch
        self._queued = queued
        self._future_of = future_of
        self._source = source

    def is_completed(self) -> bool:
        queued = self._queued
        if queued is not None and (not queued.is_completed() or queued.exception() is not None):
            return queued.is_completed()
        return self._launch.is_completed()

    def exception(self) -> BaseException | None:
        failed = None if self._queued is None else self._queued.exception()
        return failed or self._launch.error

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the call; with a timeout, block the host until the call has ended.

        Args:
            timeout: how long, as timedelta or seconds; None or 0 not to wait for the GPU at all, as in torch.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed; the operation goes on.
            DistError: the operation failed.

        Source: https://pytorch.org/docs/2.1/distributed.html#synchronous-and-asynchronous-collective-operations
        """
        seconds = wait_limit(timeout)
        limit = None if seconds is None else Deadline(seconds)
        if self._queued is not None:
            self._queued.wait(timeout)
        launch = self._launch
        while limit is not None and not launch.is_completed():
            if limit.expired():
                raise CollectiveTimeoutError(
                    f"{launch.description} did not end within {limit.seconds:.3g} s of waiting; it goes on",
                    op=launch.op,
                )
            time.sleep(_POLL_SECONDS)
        if launch.error is not None:
            raise launch.error
        launch.block_stream(launch.streams.current(launch.device))
        return True

    def result(self) -> list[Any]:
        self.wait()
        return self._arrays

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source

    def get_future(self) -> Future:
        """Return a future that completes, with ``result()`` as its value, when the GPU has completed the call."""
        ended = Future()
        launched = [] if self._queued is None else [self._queued.get_future()]
        _complete_after([*launched, self._future_of(self._launch)], self._arrays, ended)
        return ended


def _complete_after(futures: Sequence[Future], value: Any, into: Future) -> None:
    """Complete a future once all others are complete."""

    def next_future(done: Future) -> None:
        try:
            done.value()
        except BaseException as error:
            into.set_exception(error)
        else:
            _complete_after(futures[1:], value, into)

    if futures:
        futures[0].then(next_future)
    else:
        into.set_result(value)
