"""A group's calls on arrays on GPUs: launched in the group's order, carried out by an engine for GPUs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.backend import GpuBackend
from rankmesh_agent.gpu.launch import EventPool, Launch, LaunchedWork
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.gpu.watchdog import GpuWatchdog
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.pending import OnComplete
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.schemas import GroupInfo

Array = np.ndarray[Any, Any]
_PLACE = "cuda"
_FIELDS = (None, None, 0, None, None, None, "")
"""What a call's key has where it is cut short: see Call."""


class GpuCommunicator(Communicator):
    """One rank's calls on arrays on GPUs, beside those of the same group on arrays in host memory.

    A synchronous call is enqueued on the caller's current stream and returns; an asynchronous one on a stream of the
    group's own, behind what the current one has been given by then.

    Args:
        host: the group's calls on arrays in host memory.
        engine: carries out the collectives, and messages.
        exchange: what the engine's ranks meet through.
    """

    on_device = True

    def __init__(self, host: Communicator, engine: GpuBackend, exchange: StoreExchange) -> None:
        super().__init__(host.id, host.name, host.ranks, host.ranks[host.rank], host.timeout)
        self._host = host
        self.state, self.queue, self.link = host.state, host.queue, host.link
        self._engine = engine
        self._exchange = exchange
        self._submit = self._launch
        self._events = EventPool()
        self._streams: dict[tuple[int, str], int] = {}
        self._everyone = [rank for rank in range(host.size) if rank != host.rank]
        self._watch = GpuWatchdog(
            host.name,
            engine,
            exchange,
            host.size,
            lambda: host.global_ranks,
            lambda: host.failure,
            host.peer_lost_error,
            host.abort,
        )
        self._queued: Work | None = None  # the latest asynchronous call, as far as its launch
        self._making = threading.Lock()
        self._sending = threading.RLock()
        self._gathered: list[_Given] | None = None
        self._closed = False

    # Collectives

    def _launch(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> Work | None:
        """Make a call: see Order.submit. Its arrays are DeviceArrays."""
        key = (*key, *_FIELDS[len(key) :], _PLACE)
        launch = self._begun(_words(key), list(_arrays(arguments)), options, options.on_complete)
        return self._submitted(key, [launch], arguments, options)

    def submit_multigpu(
        self, key: tuple[Any, ...], each: Sequence[Sequence[Any]], afters: Sequence[OnComplete], options: Options
    ) -> Work | None:
        """Make a call in which each rank takes part with several GPUs, as if each were a rank.

        Args:
            key: the fields of its Call.
            each: for each GPU, what the call's algorithm takes.
            afters: for each GPU, what to do once the data is there.
            options: how.

        Raises:
            ValueError: two arrays of this rank are on one GPU.
        """
        key = (*key, *_FIELDS[len(key) :])
        key = (*key[:-1], f"{len(each)} GPUs a rank", _PLACE)
        described = _words(key)
        launches = [
            self._begun(described, list(_arrays(own)), options, after) for own, after in zip(each, afters, strict=True)
        ]
        if len({launch.device for launch in launches}) < len(launches):
            raise ValueError(f"{described}: two arrays of this rank are on one GPU, which NCCL refuses")
        return self._submitted(key, launches, (launches, each), options)

    def _submitted(
        self, key: tuple[Any, ...], launches: Sequence[Launch], arguments: Sequence[Any], options: Options
    ) -> Work | None:
        how = options._replace(on_complete=None, result=[])
        queued = self.queue.submit(key, (launches[0], self._attended(launches), *arguments), how)
        if not options.async_op:
            return None
        self._queued = queued
        return LaunchedWork(launches, queued, options.result, self._watch.future_of)

    @contextlib.contextmanager
    def _attended(self, launches: Sequence[Launch], *, collective: bool = True) -> Iterator[None]:
        """Have calls that are launched in the block looked after; meanwhile too, where that may wait for others."""
        early = self._engine.may_block
        if early:
            self._watch_all(launches, collective)
        try:
            yield
            for launch in launches:
                with runtime.on_device(launch.device):
                    launch.record_end()
        except BaseException as error:
            for launch in launches:
                self._watch.remove(launch)
            failure = self._host.failure
            if failure is not None and isinstance(error, Exception):
                raise failure from error  # the engine was aborted because of it
            raise
        if not early:
            self._watch_all(launches, collective)

    def _watch_all(self, launches: Sequence[Launch], collective: bool) -> None:
        for number, launch in enumerate(launches):
            self._watch.add(launch, collective=collective and number == 0)

    def _begun(
        self,
        described: str,
        arrays: Sequence[DeviceArray],
        options: Options,
        after: OnComplete,
        partners: Sequence[int] | None = None,
        lane: str = "",
    ) -> Launch:
        """Return a launch on the caller's current stream, or if it is asynchronous behind that, on one of our own.

        Collectives have one, and the messages from and to each peer: else two could send first, and none receive.
        """
        for number, array in enumerate(arrays):
            if not isinstance(array, DeviceArray):
                raise TypeError(
                    f"{described}: array {number} is in host memory, another one on a GPU; all arrays of a call have "
                    "to be on one GPU, or all in host memory"
                )
        device, streams = arrays[0].device, arrays[0].streams
        for array in arrays:
            if array.device != device:
                raise ValueError(
                    f"{described}: the arrays are on GPUs {device} and {array.device}; one call works on one, and the "
                    "functions ending in _multigpu on several"
                )
        stream = streams.current(device)
        if options.async_op:
            stream = self._behind(stream, device, lane)
        deadline = Deadline(options.timeout)
        waits_for = self._everyone if partners is None else partners
        return Launch(described, arrays, stream, after, deadline, self._events, waits_for)

    def _behind(self, stream: int, device: int, lane: str) -> int:
        """Return this group's own stream of a device, which waits for what another one has been given."""
        with runtime.on_device(device), self._making:
            own = self._streams.get((device, lane))
            if own is None:
                own = self._streams[device, lane] = runtime.create_stream()
            event = self._events.acquire(device)
            runtime.record_event(event, stream)
            runtime.stream_wait_event(event, own)
            self._events.release(device, event)  # whoever records it anew does not change what waits already
        return own

    def finish(self, timeout: float) -> None:
        """Wait, at most so many seconds, until the GPU has carried out all calls of the group so far.

        Raises:
            DistError: one failed.
        """
        deadline, queued = Deadline(timeout), self._queued
        if queued is not None:  # calls are launched in order
            try:
                queued.wait(deadline.remaining())
            except DistError:
                if not queued.is_completed():
                    raise
        self._watch.drain(deadline)

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self._message("send", array, rank, options)

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        work = self._message("recv", array, rank, options)
        return self.global_ranks[self.ranks.index(rank)] if work is None else work

    def _message(self, op: str, array: Any, rank: int, options: Options) -> LaunchedWork | None:
        failure = self._host.failure
        if failure is not None:
            raise failure
        peer = self.ranks.index(rank)
        towards = "dst" if op == "send" else "src"
        described = f"{op}({display(array.dtype)}[{array.size}], {towards}={self.global_ranks[peer]})"
        launch = self._begun(described, [array], options, options.on_complete, [peer], f"{op} {peer}")
        with self._sending:
            given = _Given(launch, op, array, peer)
            if self._gathered is None:
                self._send_all([given])
            else:
                self._gathered.append(given)
        if not options.async_op:
            return None
        number = self.global_ranks[peer]
        return _Message(launch, options.result, self._watch.future_of, number if op == "recv" else None)

    @contextlib.contextmanager
    def batch_messages(self) -> Iterator[None]:
        """Have the messages that are begun in the block go out together at its end: none waits for another."""
        with self._sending:
            self._gathered = []
            try:
                yield
                given = self._gathered
            finally:
                self._gathered = None
            self._send_all(given)

    def _send_all(self, given: Sequence[_Given]) -> None:
        """Enqueue messages together. Whoever they are from and to connect in one order first, so that all get there."""
        launches = [each.launch for each in given]
        pairs = {(each.peer, self.rank) if each.op == "recv" else (self.rank, each.peer): each for each in given}
        with self._attended(launches, collective=False), runtime.cuda_errors("messages between GPUs"):
            for sender, receiver in sorted(pairs):
                launch = pairs[sender, receiver].launch
                with runtime.on_device(launch.device):
                    self._engine.connect(launch, sender, receiver)
            with self._engine.grouped() if len(given) > 1 else contextlib.nullcontext():
                for launch, op, array, peer in given:
                    with runtime.on_device(launch.device):
                        (self._engine.send if op == "send" else self._engine.recv)(launch, array, peer)

    @property
    def gpu_backend(self) -> GpuBackend:
        """What carries out the calls."""
        return self._engine

    # What a group is asked for, the host's side answers

    @property
    def failure(self) -> DistError | None:
        return self._host.failure

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self._host.global_ranks

    @global_ranks.setter
    def global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        self._host.global_ranks = global_ranks

    @property
    def medium(self) -> str:
        return self._engine.medium

    @property
    def backend(self) -> str:
        return self._engine.name

    @property
    def batching(self) -> bool:
        return False  # calls are enqueued at once: it is the GPU that has them wait

    def use_custom_backend(self, name: str, engine: Any) -> None:
        self._host.use_custom_backend(name, engine)

    def abort(self, error: BaseException) -> None:
        self._host.abort(error)

    def info(self) -> GroupInfo:
        return self._host.info()

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        return self._host.empty(dtype, count, options)

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        return self._host.peer_lost_error(members, during)

    def close(self) -> None:
        """End the calls on GPUs, those under way too, so that nothing waits for them: see end."""
        self.end(in_order=False)

    def end(self, *, in_order: bool) -> None:
        """End the calls on GPUs; those on host memory are not touched. Does nothing the second time.

        Args:
            in_order: what was called before is carried out first, as long as it may take.
        """
        if self._closed:
            return
        self._closed = True
        if in_order:
            with contextlib.suppress(RuntimeError):  # of a group that failed; or in a callback, which cannot wait
                self.finish(self.timeout)
        if self._watch.close() or self._host.failure is not None:
            self._engine.abort()
        self._engine.close()
        for (device, _), stream in self._streams.items():
            with runtime.on_device(device):
                runtime.destroy_stream(stream)
        self._events.close()
        self._exchange.delete_keys()


class _Given(NamedTuple):
    """A message to be enqueued: ``send`` or ``recv``, to or from a group rank."""

    launch: Launch
    op: str
    array: DeviceArray
    peer: int


class _Message(LaunchedWork):
    """A message on its way between GPUs."""

    def __init__(self, launch: Launch, user: list[Any], future: Callable[[Launch], Any], source: int | None) -> None:
        super().__init__([launch], None, user, future)
        self._source = source

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source


@functools.lru_cache(1024)
def _words(key: tuple[Any, ...]) -> str:
    """Return a call in words."""
    return str(Call(*key))


def _arrays(arguments: Sequence[Any]) -> Iterator[DeviceArray]:
    for argument in arguments:
        if isinstance(argument, DeviceArray):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from argument
