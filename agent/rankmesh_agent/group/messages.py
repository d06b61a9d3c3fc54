"""Point-to-point messages of a group at one rank, from their begin to their record.

A short message is usually complete as soon as it has begun: it is recorded, and costs no more. The others are pending:
a thread waits for each until it is done, cannot complete, or its deadline passes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from rankmesh_agent.backends.base import MessageTransport
from rankmesh_agent.group.flight_recorder import MessageInfo, Record, describe, error_text, op_name
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.native_calls import total_of
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.native import core
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.progress.status import Status
from rankmesh_agent.progress.wait_graph import ASK_SECONDS, MIN_SECONDS
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.dtypes import UNPADDED, code_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError, without_traceback
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.schemas import MAX_IN_FLIGHT
from rankmesh_agent.wire.stats import BOUNDS, OpStats

Array = np.ndarray[Any, Any]
_SWEEP_SIZE = 2 * MAX_IN_FLIGHT
"""Pending messages before a new one makes the group look for those that have ended."""
_MAX_KINDS = 1024
_TAGS = range(-(1 << 63), 1 << 63)


class NativeMessages(dict[Any, Any]):
    """The synchronous messages of a group that the compiled core carries out: those of each kind."""

    def __init__(self, core: ModuleType, state: LocalGroupState, matcher: MessageMatcher) -> None:
        super().__init__()
        self._core = core
        self._state = state
        self._credits = matcher.credits
        self._counts = {"send": core.Counts(), "recv": core.Counts()}
        queues = matcher.receives.queues, matcher.unexpected.queues
        self.at_once = core.Messages(state, state.engine, queues, self, core_contention).at_once

    def added_to(self, stats: Mapping[str, OpStats]) -> dict[str, OpStats]:
        """Return statistics by operation, with those of the core's messages."""
        return {op: total_of(stats[op], counts) for op, counts in self._counts.items()}

    def __missing__(self, kind: tuple[bool, np.dtype[Any], int, int, int]) -> Any:
        """Return the core's Message of a kind of messages, None if it does not carry them, or not yet."""
        sends, dtype, count, global_rank, tag = kind
        state, engine = self._state, self._state.engine
        member = global_rank in state.global_ranks
        rank = state.ranks[state.global_ranks.index(global_rank)] if member else engine.rank
        peer, nbytes, message = engine.rings.get(rank), count * dtype.itemsize, None
        if peer is None and rank != engine.rank and not engine.is_connected(rank):
            return None
        if peer is not None and dtype in UNPADDED and nbytes <= engine.eager_limit and tag in _TAGS:
            op = "send" if sends else "recv"
            header = frames.encode(Opcode.EAGER, code_of(dtype), state.group, engine.epoch, 0, 0, tag, nbytes)
            what = op, dtype, count, rank, tag
            message = self._core.Message(state, what, self._counts[op], header, peer, self._credits[rank], nbytes)
        if len(self) >= _MAX_KINDS:
            self.clear()
        self[kind] = message
        return message


class GroupMessages:
    """One rank's messages in a group: begins them, and counts and records those that have ended. Thread-safe.

    Attributes:
        transport: carries the messages, by default the matcher; may be replaced while no message is pending.
    """

    def __init__(self, state: LocalGroupState, matcher: MessageMatcher) -> None:
        self.state = state
        self.matcher = matcher
        self.transport: MessageTransport = matcher
        self._sources = tuple(rank for rank in state.ranks if rank != state.engine.rank)
        self._op_stats = {"send": OpStats(), "recv": OpStats()}
        self._native = None if core is None else NativeMessages(core, state, matcher)
        self._lock = threading.Lock()
        self._pending: dict[int, PendingMessage] = {}
        self.waiting: dict[tuple[int, int], PendingMessage] = {}
        self.timeout: CollectiveTimeoutError | None = None
        """The latest message that timed out, unless its time was too short to wait for another rank in earnest."""
        self._sweep_at = _SWEEP_SIZE

    @property
    def at_once(self) -> Callable[..., bool] | None:
        """The compiled core's ``at_once``, where it may carry out messages."""
        return None if self._native is None or self.transport is not self.matcher else self._native.at_once

    def renumber(self) -> None:
        """Note that the members have other global ranks now."""
        if self._native is not None:
            self._native.clear()

    def transfer(self, op: str, array: Array, rank: int, tag: int, options: Options) -> tuple[Work | None, Transfer]:
        """Complete a message, or return the Work of an asynchronous one.

        Args:
            rank: the other rank, of the group's ``ranks``, or this one; or ANY.
        """
        started = time.monotonic()
        short = options.async_op or array.nbytes <= self.state.engine.eager_limit
        transfer = (self._begin if short else self._begin_long)(op, array, rank, tag, options)
        what = op, array.dtype, array.size, rank, tag
        if not transfer.done or options.async_op:
            message = PendingMessage(self, transfer, what, array.nbytes, options)
            if options.async_op:
                return Work(op, options.result, message=message), transfer
            message.complete(message.deadline)
            return None, transfer
        # Carried at once, as most short messages are: without a PendingMessage.
        self.record((self.state, what, 0, started, None, "", array.nbytes), transfer.error)
        if transfer.error is not None:
            raise without_traceback(transfer.error)
        if options.on_complete is not None:
            options.on_complete()
        return None, transfer

    def begin(self, op: str, array: Array, rank: int, tag: int, options: Options) -> PendingMessage:
        """Begin a message as ``transfer`` does; the caller completes it, or abandons it."""
        transfer = self._begin(op, array, rank, tag, options)
        return PendingMessage(self, transfer, (op, array.dtype, array.size, rank, tag), array.nbytes, options)

    def _begin_long(self, op: str, array: Array, rank: int, tag: int, options: Options) -> Transfer:
        """Begin a message of several frames; Ctrl-C comes between them."""
        transfer = None
        try:
            with interrupts_deferred():
                transfer = self._begin(op, array, rank, tag, options)
        except BaseException as error:
            if transfer is not None and not transfer.done:
                what = op, array.dtype, array.size, rank, tag
                message = PendingMessage(self, transfer, what, array.nbytes, options)
                message.abandon(error)
                self.end(message, error)
            raise
        return transfer

    def _begin(self, op: str, array: Array, rank: int, tag: int, options: Options) -> Transfer:
        state, transport = self.state, self.transport
        if state.failure is not None:
            state.broadcast_abort()
            state.raise_if_failed()
        engine = state.engine
        engine.call_count += 1
        with engine.lock:
            soon = transport is self.matcher and not options.async_op
            send, receive = transport.send, transport.receive
            if soon:
                send, receive = self.matcher.send_soon, self.matcher.receive_soon
            begin = send if op == "send" else receive
            # The view is link.as_bytes, written out: every message comes here.
            transfer = begin(rank, array.view(np.uint8).data, code_of(array.dtype), tag)
            if options.async_op and not transfer.done and rank != engine.rank:
                transport.progress_in_background(transfer)
        return transfer

    def partners(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that may be at the other end of a message to or from ``rank``."""
        return self._sources if rank == ANY else (rank,)

    def add(self, message: PendingMessage) -> None:
        """Keep a message until it ends."""
        if message.transfer.done:
            self.record(message.record, message.transfer.error)
            return
        self._pending[id(message)] = message
        if len(self._pending) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(_SWEEP_SIZE, 2 * len(self._pending))

    def end(self, message: PendingMessage, error: BaseException | None) -> None:
        """Count and record a message that has ended; the first time counts."""
        if self._pending.pop(id(message), None) is not None:
            self.record(message.record, error)

    def record(self, record: Record, error: BaseException | None) -> None:
        """Count and record a message that ends now."""
        owner, message, seq, started, _, _, nbytes = record
        ended = time.monotonic()
        seconds = ended - started
        stats = self._op_stats[message[0]]  # type: ignore[index]  # a MessageInfo
        with self._lock:
            stats.seconds += seconds
            stats.nbytes += nbytes
            stats.buckets[bisect_left(BOUNDS, seconds)] += 1
            if error is not None:
                stats.failures += 1
        text = "" if error is None else error_text(error)
        self.state.recorder.record((owner, message, seq, started, ended, text, nbytes))

    def statuses(self) -> list[Status]:
        """Return the waits for messages, as other ranks are answered. With the engine's lock held."""
        state, me = self.state, self.state.engine.rank
        waits = []
        for message in self.waiting.copy().values():
            # A rank that waits for itself says nothing about others.
            known = [rank for rank in message.partners if len(message.partners) == 1 and rank != me]
            awaited = tuple((rank, state.global_rank(rank)) for rank in known)
            what = f"{describe(message.record)} in group {state.name!r}"
            waits.append(Status(int(state.id, 16), -1, 0, what, awaited, state.ranks))
        return waits

    def active_records(self) -> list[Record]:
        """Return the messages that have not ended, the oldest first."""
        self._sweep()
        return [message.record for message in self._pending.copy().values()]

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the statistics, by operation."""
        self._sweep()
        found = self._op_stats if self._native is None else self._native.added_to(self._op_stats)
        return {op: stats for op, stats in found.items() if any(stats.buckets)}

    def _sweep(self) -> None:
        """End the messages that are done although no thread has waited for them."""
        for message in self._pending.copy().values():
            if message.transfer.done:
                self.end(message, message.transfer.error)


class PendingMessage:
    """A message under way: see work.Message."""

    def __init__(
        self, messages: GroupMessages, transfer: Transfer, what: MessageInfo, nbytes: int, options: Options
    ) -> None:
        self.transfer = transfer
        self.op = what[0]
        self.deadline = Deadline(options.timeout)
        self.record: Record = messages.state, what, 0, self.deadline.started, None, "", nbytes
        self._messages = messages
        self._state = messages.state
        self._transport = messages.transport
        self.partners = messages.partners(what[3])
        self._on_complete = options.on_complete
        messages.add(self)

    def source(self) -> int:
        return self._state.global_rank(self.transfer.source)

    def complete(self, deadline: Deadline | None) -> bool:
        """See work.Message. Not to be called again once the message is done."""
        try:
            done = self.transfer.done or self._await(deadline)
        except BaseException as error:
            # A wait shorter than the operation's own deadline may end without ending the operation.
            if deadline is self.deadline or not isinstance(error, CollectiveTimeoutError):
                if isinstance(error, CollectiveTimeoutError):
                    self._state.recorder.on_failure(error, self.deadline.started)
                self.abandon(error)
                self._messages.end(self, error)
                if isinstance(error, CollectiveTimeoutError) and self.deadline.seconds >= MIN_SECONDS:
                    self._messages.timeout = CollectiveTimeoutError(error.message, **error.details())
            raise
        if done:
            self._messages.end(self, self.transfer.error)
            if self.transfer.error is not None:
                raise without_traceback(self.transfer.error)
            if self._on_complete is not None:
                self._on_complete()
        return done

    def _await(self, deadline: Deadline | None) -> bool:
        state, transfer, partners = self._state, self.transfer, self.partners
        to_itself = partners == (state.engine.rank,)
        if deadline is None:
            self._transport.progress()
        elif to_itself and self._transport is self._messages.matcher:
            peer = "dst" if op_name(self.record[1]) == "send" else "src"
            raise ValueError(
                f"{peer} is this rank: begin both sides of the message, isend and irecv, before you wait for "
                "either, or copy the array"
            )
        else:
            waiting, me = self._messages.waiting, (id(self), threading.get_ident())
            waiting[me] = self
            settled: Callable[[], bool] = lambda: transfer.done or state.cannot_complete(partners, any_will_do=True)  # noqa: E731
            try:
                if deadline.seconds >= MIN_SECONDS and len(partners) == 1:
                    ask_by = Deadline.__new__(Deadline)  # not its __init__, a call more: most messages come here
                    ask_by.at = deadline.at - ASK_SECONDS
                    if not self._transport.wait(settled, ask_by):
                        with state.engine.lock:
                            state.engine.wait_graph.inquire(partners)
                        self._transport.wait(settled, deadline)
                else:
                    self._transport.wait(settled, deadline)
            finally:
                del waiting[me]
        if transfer.done:
            return True
        state.broadcast_abort()
        state.raise_if_failed()
        state.raise_if_peer_lost(partners, describe(self.record), any_will_do=True)
        if deadline is None:
            return False
        own = deadline is self.deadline and not to_itself
        raise state.timeout_error(partners, describe(self.record), deadline, None, own=own)

    def abandon(self, error: BaseException) -> None:
        """Undo a message that no thread will wait for; if its data is on the way, end the group."""
        engine = self._state.engine
        with engine.lock:
            undone = self._transport.cancel(self.transfer)
            undone |= bool(self._state.gone(self.partners, any_will_do=True))
        if not undone:
            self._state.abort(error)
