"""Stream for the calls of an attached process, at its agent: one request at a time, in the thread that receives it."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import Frame, FramedStream, ReusableBuffer, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import describe_agent, describe_group, dtype_from_code, error_to_json
from rankmesh_agent.remote.session import HeldMessage, Session
from rankmesh_agent.store import codec as store_codec
from rankmesh_agent.store import commands
from rankmesh_agent.store.base import MARGIN_SECONDS
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.key_waits import failed_wait_error
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, HAS_NOTE, Call, Request, Response
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.ops import OpType, ReduceOp

_MAX_KEPT_BYTES = 64 << 20
"""Memory that a stream keeps for its next call."""
_STORE_SLICE_SECONDS = 0.5
"""Length of one wait at the store, after which the stream is checked: the client may have closed it."""
_NOTE_SECONDS = 10.0
_SOURCE = struct.Struct("!q")
"""Document of the response to a completed message: the sender's rank, or the number of an eager message."""

_log = logging.getLogger("rankmesh")

Reply = tuple[Response, bytes, Sequence[memoryview]]
"""A response's kind, document and payload."""
_OK: Reply = Response.OK, b"", ()


class CallStream:
    """One stream, and its thread.

    Args:
        session: of the attached process.
        stream: a new one of its streams.
    """

    def __init__(self, session: Session, stream: FramedStream) -> None:
        self._session = session
        self._stream = stream
        self._in, self._out = ReusableBuffer(_MAX_KEPT_BYTES), ReusableBuffer(_MAX_KEPT_BYTES)

    def serve(self) -> None:
        """Execute requests until the stream ends."""
        stream = self._stream
        while True:
            try:
                frame = stream.receive(None)
                descriptors: list[int] = []
                try:
                    kind, document, payload = self._execute(frame, descriptors)
                except (StreamClosedError, StreamTimeoutError, ProtocolError):
                    raise
                except Exception as error:
                    known = error_to_json(self._session.ended() or error)
                    kind, document, payload = Response.ERROR, attach_frames.encode_json(known), ()
                stream.send(attach_frames.encode(kind, document, sum(map(len, payload))), payload, descriptors)
            except (StreamClosedError, StreamTimeoutError):
                return
            except ProtocolError as error:
                _log.warning("an attached process violates the protocol: %s", error.message)
                return

    def _execute(self, frame: Frame, descriptors: list[int]) -> Reply:
        """Execute a request; descriptors that go along with the response are added to the list."""
        kind = frame.header.kind
        if kind == Request.CALL:
            return self._collective(attach_frames.decode_call(frame.document), frame)
        if kind in (Request.SEND, Request.RECEIVE):
            return self._begin_message(attach_frames.decode_call(frame.document), frame)
        if kind == Request.WAIT:
            call = attach_frames.decode_call(frame.document)
            deadline = Deadline(call.seconds) if call.seconds >= 0 else None
            return self._wait(call.number, deadline, own=bool(frame.header.flags & BLOCKING))
        if kind == Request.STORE:
            *_, seconds = store_frames.decode_request(frame.document)
            return Response.OK, store_codec.serve(frame.document, partial(self._execute_command, seconds)), ()
        if kind == Request.NEW_GROUP:
            wanted = attach_frames.decode_json(frame.document)
            ranks = [int(rank) for rank in wanted["ranks"]]
            numbers = [int(rank) for rank in wanted.get("numbers", ranks)]
            group = self._session.make_group(ranks, float(wanted["timeout"]), numbers)
            description, descriptors[:] = describe_group(group)
            return Response.OK, attach_frames.encode_json(description), ()
        if kind == Request.GROW:
            wanted = attach_frames.decode_json(frame.document)
            agent = self._session.grow(int(wanted["world_size"]), float(wanted["seconds"]), self._check_client)
            description, descriptors[:] = describe_agent(agent)
            return Response.OK, attach_frames.encode_json(description), ()
        execute = _REQUESTS.get(kind)
        if execute is None:
            raise ProtocolError(f"an attached process sent an unknown request, {kind}")
        try:
            response = execute(self._session, attach_frames.decode_json(frame.document))
        except CallMismatchError:
            return Response.PENDING, b"", ()
        return Response.OK, b"" if response is None else attach_frames.encode_json(response), ()

    def _check_client(self) -> None:
        if self._stream.peer_closed():
            raise StreamClosedError("the client does not wait for the response any more")

    # Collectives

    def _collective(self, call: Call, frame: Frame) -> Reply:
        dtype = dtype_from_code(call.dtype) if call.dtype else np.dtype(np.uint8)
        inputs = self._receive_inputs(call, frame, dtype)
        group = self._session.group(call.group)
        details = self._request_details if frame.header.flags & HAS_NOTE else None
        options, root = Options(call.seconds, details=details), call.tag
        op = ReduceOp(call.op) if call.op != attach_frames.NO_OP else ReduceOp.SUM
        outputs = _split(self._out.take(sum(call.outputs) * dtype.itemsize), dtype, call.outputs)
        returned = outputs
        match call.what:
            case OpType.BARRIER:
                group.barrier(options)
            case OpType.EMPTY:
                group.empty(dtype, call.number, options)
            case OpType.ALL_REDUCE:
                group.all_reduce(inputs[0], op, options, call.subject)
                returned = inputs
            case OpType.REDUCE:
                group.reduce(inputs[0], op, root, options)
                returned = inputs if group.rank == root else []
            case OpType.BROADCAST:
                group.broadcast((inputs or outputs)[0], root, options, call.subject)
            case OpType.ALL_GATHER:
                group.all_gather(outputs, inputs[0], options, call.subject)
            case OpType.GATHER:
                group.gather(outputs, inputs[0], root, options)
            case OpType.SCATTER:
                group.scatter(outputs[0], inputs, root, options)
            case OpType.REDUCE_SCATTER:
                group.reduce_scatter(outputs[0], inputs, op, options)
            case OpType.ALL_TO_ALL:
                group.all_to_all(outputs, inputs, options)
            case _:
                raise ProtocolError(f"an attached process requested an unknown collective, {call.what}")
        return Response.OK, b"", [as_bytes(array) for array in returned]

    def _receive_inputs(self, call: Call, frame: Frame, dtype: np.dtype[Any]) -> list[Array]:
        """Receive the arrays that come with a call."""
        return _split(self._in.receive(self._stream, _sizes(call, frame, dtype)[0]), dtype, call.inputs)

    def _request_details(self) -> str:
        """Request more details of its call from the client."""
        self._stream.send(attach_frames.encode(Response.NEED_NOTE))
        frame = self._stream.receive(Deadline(_NOTE_SECONDS))
        if frame.header.kind != Request.NOTE:
            raise ProtocolError(f"an attached process sent request {frame.header.kind} in place of a note")
        return bytes(frame.document).decode("utf-8", "replace")

    # Messages

    def _begin_message(self, call: Call, frame: Frame) -> Reply:
        dtype = dtype_from_code(call.dtype)
        sent, expected = _sizes(call, frame, dtype)
        # Memory of its own: an asynchronous message is under way during the stream's next calls.
        memory = ReusableBuffer(0).receive(self._stream, sent) if sent else np.empty(expected, np.uint8)
        array: Array = memory.view(dtype)
        group = self._session.group(call.group)
        if group.state.unanswered:
            group.raise_refusal()
        blocking = bool(frame.header.flags & BLOCKING)
        options = Options(call.seconds, async_op=not blocking)
        op = "send" if frame.header.kind == Request.SEND else "recv"
        message = group.messages.begin(op, array, call.rank, call.tag, options)
        held = HeldMessage(group, message, None if op == "send" else array)
        self._session.messages[call.number] = held
        return self._wait(call.number, None, own=blocking)

    def _wait(self, number: int, deadline: Deadline | None, *, own: bool) -> Reply:
        """Wait for a message until a deadline, or its own one; None: do not wait."""
        _, message, array = self._session.message(number)
        try:
            done = message.complete(message.deadline if own else deadline)
        except CollectiveTimeoutError:
            if own or message.transfer.error is not None:
                self._session.messages.pop(number, None)
            raise
        except BaseException:
            self._session.messages.pop(number, None)
            raise
        if not done:
            return Response.PENDING, b"", ()
        self._session.messages.pop(number, None)
        if array is None:
            return Response.OK, _SOURCE.pack(message.transfer.eager_id), ()
        return Response.OK, _SOURCE.pack(message.source()), [as_bytes(array)]

    # The store

    def _execute_command(self, seconds: float, command: Command[Any]) -> Any:
        """Execute a command of the client, which waits for the response for ``seconds``."""
        store = self._session.store
        if not isinstance(command, Waiting):
            return store.execute(command, seconds)
        deadline, failures = Deadline(seconds), store.failures
        while True:
            wait = min(_STORE_SLICE_SECONDS, deadline.remaining())
            margin = deadline.remaining() - wait + MARGIN_SECONDS
            try:
                result = store.execute(command.with_timeout(wait), margin)
            except StoreUnresponsiveError:
                raise
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
                failure = store.failure_since(failures)
                if failure is not None:  # between two slices
                    raise failed_wait_error(failure, error) from None
                if error.ranks or deadline.expired() or self._stream.peer_closed():
                    raise
                continue
            if isinstance(command, commands.QueuePop) and self._stream.peer_closed():
                # The client has gone, so the value goes back to the queue.
                store.undo(command, result)
            return result


_REQUESTS: dict[int, Callable[[Session, dict[str, Any]], dict[str, Any] | None]] = {
    Request.DROP_GROUP: Session.drop_group,
    Request.SET_GLOBAL_RANKS: Session.set_global_ranks,
    Request.SET_TIMEOUT: Session.set_timeout,
    Request.FAILURE: Session.failure,
    Request.CHECK_PEERS: Session.check_peers,
    Request.VERIFY: Session.verify,
    Request.EXCHANGE_DESCRIPTIONS: Session.exchange_descriptions,
    Request.REFUSAL: Session.refusal,
    Request.NUM_WAITING: Session.num_waiting,
}


def _sizes(call: Call, frame: Frame, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes of the arrays that come with a call, and of those that it fills.

    Raises:
        ProtocolError: the frame has another number of bytes, or the arrays are too large.
    """
    inputs, outputs = sum(call.inputs) * dtype.itemsize, sum(call.outputs) * dtype.itemsize
    if inputs != frame.header.payload or outputs > attach_frames.MAX_PAYLOAD:
        raise ProtocolError(
            f"an attached process sent {frame.header.payload} bytes for a call that reads arrays of {inputs} bytes and "
            f"fills arrays of {outputs} bytes"
        )
    return inputs, outputs


def _split(memory: Array, dtype: np.dtype[Any], lengths: Sequence[int]) -> list[Array]:
    """Return arrays of these lengths, one behind the other in memory."""
    arrays, begin = [], 0
    for length in lengths:
        end = begin + length * dtype.itemsize
        arrays.append(memory[begin:end].view(dtype))
        begin = end
    return arrays
