"""What an agent does for the process that has leased it: one call of each of its lanes at a time."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rankmesh_agent.agent import Agent
from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.pending import PendingMessage
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import Frame, FramedStream, ReusableBuffer, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.codec import call_from_json, describe_group, dtype_from_code, report_from_json
from rankmesh_agent.store import codec as store_codec
from rankmesh_agent.store import commands
from rankmesh_agent.store.blocking import BlockingMemoryStore, BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, HAS_NOTE, Call, Request, Response
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistStoreError,
    GroupAbortedError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.ops import OpType, ReduceOp

_KEPT = 64 << 20
"""Bytes of memory that a lane keeps for its next call."""
_STORE_SLICE = 0.5
"""Seconds after which a call that waits at the store is looked after: whether its caller still waits, too."""
_NUMBER = struct.Struct("!q")
_NOTE_SECONDS = 10.0

_log = logging.getLogger("rankmesh")

Reply = tuple[Response, bytes, Sequence[memoryview]]


class Session:
    """The agent's side of a lease.

    Args:
        agent: has joined the job.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._groups: dict[int, LocalCommunicator] = {agent.world.id: agent.world}
        self._messages: dict[int, tuple[LocalCommunicator, PendingMessage, Array | None]] = {}
        self._place: BlockingStore | None = None
        self._lanes: set[FramedStream] = set()
        self._closed = False

    def close(self) -> None:
        """End the lanes: their threads end with the calls that they are busy with."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes)
            place = self._place
        for channel in lanes:
            channel.shutdown()
        if place is not None:
            place.close()

    # What the lease's own connection asks for

    def abort(self, said: dict[str, Any]) -> dict[str, Any]:
        """End a group because of an error at the client; return the failure."""
        group = self._group(int(said["group"]))
        call = said.get("call")
        failure = group.delegated_calls.abort(
            None if call is None else call_from_json(call),
            int(said.get("seq", 0)),
            bool(said.get("busy")),
            codec.error_from_json(said["error"], at_agent=True),
        )
        return {} if failure is None else codec.error_to_json(failure)

    def cancel(self, said: dict[str, Any]) -> None:
        """Give up messages that the client does not wait for any more."""
        error = codec.error_from_json(said["error"], at_agent=True)
        for number in said["messages"]:
            with self._lock:
                held = self._messages.get(int(number))
            if held is not None:
                held[1].abandon(error)
                if not said.get("waited"):
                    self._forget(int(number))

    def report(self, said: dict[str, Any]) -> dict[str, Any]:
        """Take note of the calls that the client has made itself; return the groups' failures."""
        for number, told in said["groups"]:
            with self._lock:
                group = self._groups.get(int(number))
            if group is not None:
                group.delegated_calls.update(report_from_json(told))
        with self._lock:
            failures = [(group.id, group.failure) for group in self._groups.values()]
        return {"failures": [(number, codec.error_to_json(error)) for number, error in failures if error is not None]}

    def abort_pending_groups(self, said: dict[str, Any]) -> None:
        """End the groups that are being made."""
        self._agent.group_registry.abort_pending(codec.error_from_json(said["error"], at_agent=True))

    # Lanes

    def serve_stream(self, channel: FramedStream) -> None:
        """Do what a lane asks for, until it ends."""
        with self._lock:
            if self._closed:
                return
            self._lanes.add(channel)
        try:
            _Lane(self, channel).serve()
        finally:
            with self._lock:
                self._lanes.discard(channel)

    def _group(self, number: int) -> LocalCommunicator:
        with self._lock:
            group = self._groups.get(number)
        if group is None:
            raise GroupAbortedError("the agent has no such group any more: it has been destroyed, or the lease ended")
        return group

    def make_group(self, ranks: list[int], timeout: float) -> LocalCommunicator:
        """Make a group."""
        group = self._agent.new_group(ranks, timeout)
        with self._lock:
            self._groups[group.id] = group
        return group

    def drop_group(self, number: int) -> None:
        """End a group at this rank."""
        group = self._group(number)
        with self._lock:
            del self._groups[number]
            self._messages = {number: held for number, held in self._messages.items() if held[0] is not group}
        self._agent.drop_group(group)

    def add_message(self, number: int, group: LocalCommunicator, message: PendingMessage, array: Array | None) -> None:
        """Keep a message that is under way, and the array it is received into."""
        with self._lock:
            self._messages[number] = group, message, array

    def message(self, number: int) -> tuple[LocalCommunicator, PendingMessage, Array | None]:
        """Return a message that is under way."""
        with self._lock:
            held = self._messages.get(number)
        if held is None:
            raise GroupAbortedError("the agent does not know the message any more: its group has been destroyed")
        return held

    def _forget(self, number: int) -> None:
        with self._lock:
            self._messages.pop(number, None)

    def wait(self, number: int, deadline: Deadline | None, *, own: bool) -> Reply:
        """Wait for a message, or with None just look."""
        group, message, array = self.message(number)
        try:
            done = message.complete(message.deadline if own else deadline)
        except CollectiveTimeoutError:
            if own or message.transfer.error is not None:
                self._forget(number)
            raise
        except BaseException:
            self._forget(number)
            raise
        if not done:
            return Response.PENDING, b"", ()
        self._forget(number)
        if array is None:
            return Response.OK, b"", ()
        return Response.OK, _NUMBER.pack(group.source(message)), [as_bytes(array)]

    @property
    def store(self) -> BlockingStore:
        """Where the job's store is."""
        with self._lock:
            if self._place is None:
                self._place = self._agent.blocking_store()
            return self._place


class _Lane:
    """One connection for calls, and its thread."""

    def __init__(self, desk: Session, channel: FramedStream) -> None:
        self._desk = desk
        self._channel = channel
        self._in, self._out = ReusableBuffer(_KEPT), ReusableBuffer(_KEPT)

    def serve(self) -> None:
        channel = self._channel
        while True:
            try:
                frame = channel.receive(None)
                try:
                    answer, document, payload = self._answer(frame)
                except (StreamClosedError, StreamTimeoutError, ProtocolError):
                    raise
                except Exception as error:
                    answer, document, payload = Response.ERROR, b"", ()
                    document = attach_frames.encode_json(codec.error_to_json(error))
                if answer is not None:
                    length = sum(map(len, payload))
                    channel.send(attach_frames.encode(answer, document, length), payload)
            except (StreamClosedError, StreamTimeoutError):
                return
            except ProtocolError as error:
                _log.warning("an attached process does not keep to the protocol: %s", error.message)
                return

    def _answer(self, frame: Frame) -> tuple[Response | None, bytes, Sequence[memoryview]]:
        kind = frame.header.kind
        if kind == Request.CALL:
            return self._collective(attach_frames.decode_call(frame.document), frame)
        if kind in (Request.SEND, Request.RECEIVE):
            return self._message(attach_frames.decode_call(frame.document), frame)
        if kind == Request.WAIT:
            call = attach_frames.decode_call(frame.document)
            own = bool(frame.header.flags & BLOCKING)
            return self._desk.wait(call.number, Deadline(call.seconds) if call.seconds >= 0 else None, own=own)
        if kind == Request.STORE:
            return Response.OK, self._store(bytes(frame.document)), ()
        ask = _OTHERS.get(kind)
        if ask is None:
            raise ProtocolError(f"an attached process asked for {kind}, which there is not")
        return ask(self, attach_frames.decode_json(frame.document))

    # Collectives

    def _collective(self, call: Call, frame: Frame) -> Reply:
        inputs = self._inputs(call, frame)
        dtype = dtype_from_code(call.dtype) if call.dtype else np.dtype(np.uint8)
        group = self._desk._group(call.group)
        note = self._note if frame.header.flags & HAS_NOTE else None
        options, root = Options(call.seconds, details=note), call.tag
        if call.what == OpType.BARRIER:
            group.barrier(options)
            return Response.OK, b"", ()
        if call.what == OpType.EMPTY:
            group.empty(dtype, call.number, options)
            return Response.OK, b"", ()
        op = ReduceOp(call.op) if call.op != attach_frames.NO_OP else ReduceOp.SUM
        if call.what == OpType.ALL_REDUCE:
            group.all_reduce(inputs[0], op, options, call.subject)
            return Response.OK, b"", [as_bytes(inputs[0])]
        if call.what == OpType.REDUCE:
            group.reduce(inputs[0], op, root, options)
            return Response.OK, b"", [as_bytes(inputs[0])] if group.rank == root else []
        outputs = _cut(self._out.take(sum(call.outputs) * dtype.itemsize), dtype, call.outputs)
        if call.what == OpType.BROADCAST:
            group.broadcast((inputs or outputs)[0], root, options)
        elif call.what == OpType.ALL_GATHER:
            group.all_gather(outputs, inputs[0], options)
        elif call.what == OpType.GATHER:
            group.gather(outputs, inputs[0], root, options)
        elif call.what == OpType.SCATTER:
            group.scatter(outputs[0], inputs, root, options)
        elif call.what == OpType.REDUCE_SCATTER:
            group.reduce_scatter(outputs[0], inputs, op, options)
        elif call.what == OpType.ALL_TO_ALL:
            group.all_to_all(outputs, inputs, options)
        else:
            raise ProtocolError(f"an attached process asked for collective {call.what}, which there is not")
        return Response.OK, b"", [as_bytes(output) for output in outputs]

    def _inputs(self, call: Call, frame: Frame) -> list[Array]:
        """Receive the arrays that come with a call."""
        nbytes = frame.header.payload
        dtype = dtype_from_code(call.dtype) if call.dtype else np.dtype(np.uint8)
        if sum(call.inputs) * dtype.itemsize != nbytes:
            raise ProtocolError(f"an attached process sent {nbytes} bytes of arrays of {call.inputs} elements")
        memory = self._in.take(nbytes)
        self._channel.receive_into([memory.data])
        return _cut(memory, dtype, call.inputs)

    def _note(self) -> str:
        """Ask the client what else there is to say of its call."""
        self._channel.send(attach_frames.encode(Response.NEED_NOTE))
        frame = self._channel.receive(Deadline(_NOTE_SECONDS))
        if frame.header.kind != Request.NOTE:
            raise ProtocolError("an attached process was asked for a note and sent something else")
        return bytes(frame.document).decode("utf-8", "replace")

    # Messages

    def _message(self, call: Call, frame: Frame) -> Reply:
        dtype = dtype_from_code(call.dtype)
        array: Array = np.empty(sum(call.inputs) + sum(call.outputs), dtype)
        if frame.header.payload != sum(call.inputs) * dtype.itemsize:
            raise ProtocolError(f"an attached process sent {frame.header.payload} bytes of {array.nbytes}")
        if frame.header.payload:
            self._channel.receive_into([as_bytes(array)])
        group = self._desk._group(call.group)
        waits = bool(frame.header.flags & BLOCKING)
        options = Options(call.seconds, async_op=not waits)
        if frame.header.kind == Request.SEND:
            message = group.begin_send(array, call.rank, call.tag, options)
            self._desk.add_message(call.number, group, message, None)
        else:
            message = group.begin_receive(array, call.rank, call.tag, options)
            self._desk.add_message(call.number, group, message, array)
        return self._desk.wait(call.number, None, own=waits)

    # The rest, in JSON

    def _new_group(self, said: dict[str, Any]) -> tuple[None, bytes, Sequence[memoryview]]:
        group = self._desk.make_group([int(rank) for rank in said["ranks"]], float(said["timeout"]))
        told, descriptors = describe_group(group)
        document = attach_frames.encode_json(told.to_json())
        self._channel.send(attach_frames.encode(Response.OK, document), (), descriptors)
        return None, b"", ()

    def _drop_group(self, said: dict[str, Any]) -> Reply:
        self._desk.drop_group(int(said["group"]))
        return Response.OK, b"", ()

    def _numbers(self, said: dict[str, Any]) -> Reply:
        self._desk._group(int(said["group"])).global_ranks = tuple(int(number) for number in said["numbers"])
        return Response.OK, b"", ()

    def _timeout(self, said: dict[str, Any]) -> Reply:
        self._desk._group(int(said["group"])).set_timeout(float(said["timeout"]))
        return Response.OK, b"", ()

    def _failure(self, said: dict[str, Any]) -> Reply:
        failure = self._desk._group(int(said["group"])).failure
        return Response.OK, attach_frames.encode_json({} if failure is None else codec.error_to_json(failure)), ()

    def _look(self, said: dict[str, Any]) -> Reply:
        group = self._desk._group(int(said["group"]))
        group.delegated_calls.check_peers(
            call_from_json(said["call"]), said["seq"], said["missing"], said["seconds"], said["left"]
        )
        return Response.OK, b"", ()

    def _meet(self, said: dict[str, Any]) -> Reply:
        group = self._desk._group(int(said["group"]))
        try:
            group.delegated_calls.verify(
                call_from_json(said["call"]), said["seq"], said["fingerprint"], said["seconds"]
            )
        except CallMismatchError:
            return Response.PENDING, b"", ()
        return Response.OK, b"", ()

    def _retell(self, said: dict[str, Any]) -> Reply:
        group = self._desk._group(int(said["group"]))
        told = group.delegated_calls.exchange_descriptions(
            call_from_json(said["call"]), said["seq"], said["seconds"], said["said"].encode()
        )
        document = attach_frames.encode_json({"told": [text.decode("utf-8", "replace") for text in told]})
        return Response.OK, document, ()

    def _store(self, request: bytes) -> bytes:
        opcode, flags, seq, count, _, seconds = store_frames.decode_request(request)
        try:
            command = store_codec.decode_command(opcode, flags, seconds, store_frames.decode_parts(request, count))
            return store_codec.encode_result(seq, self._carry_out(command))
        except DistStoreError as error:
            return store_codec.encode_error(seq, error)

    def _carry_out(self, command: Command[Any]) -> Any:
        place = self._desk.store
        if not isinstance(command, Waiting) or not command.seconds:
            return place.execute(command)
        deadline = Deadline(command.seconds)
        while True:
            try:
                result = place.execute(command.with_timeout(min(_STORE_SLICE, deadline.remaining())))
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError):
                if deadline.expired() or self._channel.peer_closed():
                    raise
                continue
            if isinstance(command, commands.QueuePop) and self._channel.peer_closed():
                # Nobody will get it otherwise: whoever asked for it has gone.
                if isinstance(place, BlockingMemoryStore):
                    command.undo(place.table, result)
                else:
                    place.execute(commands.QueuePush(command.key, result))
            return result


_OTHERS: dict[int, Callable[[_Lane, dict[str, Any]], tuple[Response | None, bytes, Sequence[memoryview]]]] = {
    Request.NEW_GROUP: _Lane._new_group,
    Request.DROP_GROUP: _Lane._drop_group,
    Request.SET_GLOBAL_RANKS: _Lane._numbers,
    Request.SET_TIMEOUT: _Lane._timeout,
    Request.FAILURE: _Lane._failure,
    Request.CHECK_PEERS: _Lane._look,
    Request.VERIFY: _Lane._meet,
    Request.EXCHANGE_DESCRIPTIONS: _Lane._retell,
}


def _cut(memory: Array, dtype: np.dtype[Any], lengths: Sequence[int]) -> list[Array]:
    """Return arrays of these lengths, one behind the other in memory."""
    found, begin = [], 0
    for length in lengths:
        end = begin + length * dtype.itemsize
        found.append(memory[begin:end].view(dtype))
        begin = end
    return found
