"""A call that is enqueued on a GPU's stream: when it has ended there, and who waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray, Streams
from rankmesh_agent.group.pending import OnComplete
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError

_POLL_SECONDS = 0.0002
"""How often a wait with a timeout looks whether the GPU has got there."""


class EventPool:
    """CUDA events, used again and again: making one takes longer than recording it. For any thread."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}

    def acquire(self, device: int) -> int:
        """Return an event of a device, which is the current one."""
        free = self._free.setdefault(device, [])
        try:
            return free.pop()
        except IndexError:
            return runtime.create_event()

    def release(self, device: int, event: int) -> None:
        """Take an event back that nobody waits for any more."""
        self._free[device].append(event)

    def close(self) -> None:
        """Let all events go that are free."""
        for events in self._free.values():
            while events:
                runtime.destroy_event(events.pop())


class Launch:
    """One call, from its launch until the GPU has carried it out.

    Args:
        call: what it is, in words.
        arrays: which it works on; they are kept until it has ended.
        stream: on which it is launched.
        after: what the call's user wants done on the stream behind it (copy a staged array back).
        deadline: when it has to be over.
        events: where its event comes from.
        partners: group ranks without which it does not end.

    Attributes:
        device, streams: of the arrays.
        stream: see above.
        deadline: see above.
        described: see ``call``.
        partners: see above.
        error: why it failed, None while it has not.
    """

    def __init__(
        self,
        call: str,
        arrays: Sequence[DeviceArray],
        stream: int,
        after: OnComplete,
        deadline: Deadline,
        events: EventPool,
        peers: Sequence[int],
    ) -> None:
        self.peers = peers
        self.description = call
        self.device = arrays[0].device
        self.streams: Streams = arrays[0].streams
        self.stream = stream
        self.deadline = deadline
        self.error: DistError | None = None
        self.future: Future | None = None
        self._arrays: Sequence[DeviceArray] | None = arrays
        self._after = after
        self._events = events
        self._event: int | None = None
        self._scratch: list[Any] = []
        self._ended = False
        self._lock = threading.Lock()

    def scratch_rows(self, like: DeviceArray, count: int) -> list[DeviceArray]:
        """Return arrays like another one to work in on the stream, behind one another; kept until the call ends."""
        memory = runtime.allocate(max(count * like.nbytes, 1), self.stream)
        self._scratch.append(memory)
        whole = DeviceArray(int(memory.ptr), count * like.size, like.dtype, like.device, memory, like.streams)
        return [whole[row * like.size : (row + 1) * like.size] for row in range(count)]

    def record_end(self) -> None:
        """Take note that all of the call has been enqueued. In the thread that did so, the device being current."""
        if self._after is not None:
            with self.streams.using(self.device, self.stream):
                self._after()
        event = self._events.acquire(self.device)
        runtime.record_event(event, self.stream)  # before anybody asks it: one that is used again has happened
        with self._lock:
            if not self._ended:
                self._event = event

    def is_completed(self) -> bool:
        """Whether the GPU has carried the call out, or the call has failed; lets go of what it kept then."""
        with self._lock:
            if not self._ended and self._event is not None and (self.error is not None or self._happened(self._event)):
                self._ended = True
                self._events.release(self.device, self._event)
                self._event = self._arrays = self._after = None
                self._scratch.clear()
            return self._ended

    def _happened(self, event: int) -> bool:
        with runtime.on_device(self.device):  # asked on another one, CUDA makes a context there
            return runtime.event_completed(event)

    def fail(self, error: DistError) -> None:
        """End the call with an error: its engine has been aborted."""
        with self._lock:
            if self._ended:
                return
            self.error = error
            self._ended = True
            # The event is not used again: a stream may still be about to wait for it.
            self._event = self._arrays = self._after = None
            self._scratch.clear()

    def block_stream(self, stream: int) -> None:
        """Have a stream wait until the GPU has carried the call out."""
        with self._lock:
            if self._event is not None:
                with runtime.on_device(self.device):
                    runtime.stream_wait_event(self._event, stream)


class LaunchedWork(Work):
    """What an asynchronous call on arrays on GPUs returns. Waiting for it makes the current stream wait, not the host.

    Args:
        launches: the call, on each GPU that it works on.
        queued: its launch, which an earlier call of the group may hold up; None if it has been launched.
        user: the user's arrays.
        future: returns what is complete when a GPU has carried a launch out.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        queued: Work | None,
        user: list[Any],
        future: Callable[[Launch], Future],
    ) -> None:
        self._launches = launches
        self._queued = queued
        self._user = user
        self._future = future

    def is_completed(self) -> bool:
        queued = self._queued
        if queued is not None and (not queued.is_completed() or queued.exception() is not None):
            return queued.is_completed()
        return all(launch.is_completed() for launch in self._launches)

    def exception(self) -> BaseException | None:
        failed = None if self._queued is None else self._queued.exception()
        return failed or next((launch.error for launch in self._launches if launch.error is not None), None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the call; with a timeout, wait for its end here.

        Args:
            timeout: how long, as timedelta or seconds; None not to wait for the GPU at all, as torch does.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed; the operation goes on.
            DistError: the operation failed.

        Source: https://pytorch.org/docs/2.1/distributed.html#synchronous-and-asynchronous-collective-operations
        """
        limit = None if timeout is None else Deadline(seconds_of(timeout, 0.0))
        if self._queued is not None:
            self._queued.wait(timeout)
        for launch in self._launches:
            while limit is not None and not launch.is_completed():
                if limit.expired():
                    raise CollectiveTimeoutError(
                        f"{launch.description} did not end within {limit.seconds:.3g} s of waiting; it goes on",
                        op=launch.description.partition("(")[0],
                    )
                time.sleep(_POLL_SECONDS)
            if launch.error is not None:
                raise launch.error
            launch.block_stream(launch.streams.current(launch.device))
        return True

    def result(self) -> list[Any]:
        self.wait()
        return self._user

    def get_future(self) -> Future:
        """Return a future that is complete when the GPUs have carried the call out; its value is ``result()``."""
        ended = Future()
        launched = [] if self._queued is None else [self._queued.get_future()]
        _complete_after([*launched, *map(self._future, self._launches)], self._user, ended)
        return ended


def _complete_after(futures: Sequence[Future], value: Any, into: Future) -> None:
    """Complete a future when others are, one after the other."""

    def following(done: Future) -> None:
        try:
            done.value()
        except BaseException as error:
            into.set_exception(error)
        else:
            _complete_after(futures[1:], value, into)

    if futures:
        futures[0].then(following)
    else:
        into.set_result(value)
