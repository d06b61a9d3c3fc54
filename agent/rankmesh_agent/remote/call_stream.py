"""Stream for the calls of an attached process, at its agent: one request at a time, in the thread that receives it."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import Frame, FramedStream, ReusableBuffer, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote import staging
from rankmesh_agent.remote.codec import (
    describe_agent,
    dtype_from_code,
    error_to_json,
)
from rankmesh_agent.remote.session import HeldMessage, Session
from rankmesh_agent.store import codec as store_codec
from rankmesh_agent.store import commands
from rankmesh_agent.store.client import failed_wait_error
from rankmesh_agent.store.command import Waiting
from rankmesh_agent.store.store import MARGIN_SECONDS
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, STAGED, Call, Request, Response
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.ops import OpType, ReduceOp

_STORE_SLICE_SECONDS = 0.5
"""Length of one wait at the store, after which the stream is checked: the client may have closed it."""
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
        self._in, self._out = ReusableBuffer(staging.MAX_KEPT_BYTES), ReusableBuffer(staging.MAX_KEPT_BYTES)
        self._staging: Mapping | None = None

    def serve(self) -> None:
        """Execute requests until the stream ends."""
        stream = self._stream
        while True:
            try:
                frame = stream.receive(None, descriptors=True)
                if frame.descriptors:
                    self._staging = staging.map_received(frame.descriptors)
                try:
                    kind, document, payload = self._execute(frame)
                except (StreamClosedError, StreamTimeoutError, ProtocolError):
                    raise
                except Exception as error:
                    known = error_to_json(self._session.ended() or error)
                    kind, document, payload = Response.ERROR, attach_frames.encode_json(known), ()
                if frame.header.flags & STAGED:
                    payload = ()  # it is in the buffer
                    if self._staging is not None and not staging.is_kept(self._staging):
                        self._staging = None
                stream.send(attach_frames.encode(kind, document, sum(map(len, payload))), payload)
            except (StreamClosedError, StreamTimeoutError):
                return
            except ProtocolError as error:
                _log.warning("an attached process violates the protocol: %s", error.message)
                return

    def _execute(self, frame: Frame) -> Reply:
        kind = frame.header.kind
        if kind == Request.CALL:
            return self._collective(attach_frames.decode_call(frame.document), frame)
        if kind in (Request.SEND, Request.RECEIVE):
            return self._begin_message(attach_frames.decode_call(frame.document), frame)
        if kind == Request.WAIT:
            call = attach_frames.decode_call(frame.document)
            deadline = Deadline(call.seconds) if call.seconds >= 0 else None
            return self._wait(call.number, deadline, frame, own=bool(frame.header.flags & BLOCKING))
        if kind == Request.STORE:
            return Response.OK, store_codec.serve(frame.document, self._execute_command), ()
        if kind == Request.GROW:
            wanted = attach_frames.decode_json(frame.document)
            agent = self._session.grow(int(wanted["world_size"]), float(wanted["seconds"]), self._check_client)
            return Response.OK, attach_frames.encode_json(describe_agent(agent)), ()
        return Response.OK, self._session.execute(frame), ()

    def _check_client(self) -> None:
        if self._stream.peer_closed():
            raise StreamClosedError("the client does not wait for the response any more")

    # Collectives

    def _collective(self, call: Call, frame: Frame) -> Reply:
        dtype = dtype_from_code(call.dtype) if call.dtype else np.dtype(np.uint8)
        inputs, outputs = self._arrays(call, frame, dtype)
        group = self._session.group(call.group)
        options, root = Options(call.seconds, details=(lambda: call.details) if call.details else None), call.tag
        op = ReduceOp(call.op) if call.op != attach_frames.NO_OP else ReduceOp.SUM
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

    def _arrays(self, call: Call, frame: Frame, dtype: np.dtype[Any]) -> tuple[list[Array], list[Array]]:
        """Return the arrays that a call reads, and those that it fills."""
        sent, filled = _sizes(call, frame, dtype)
        if frame.header.flags & STAGED:
            memory = self._staged(sent + filled)
            source, target = memory[:sent], memory[sent:]
        else:
            source, target = self._in.receive(self._stream, sent), self._out.take(filled)
        return _split(source, dtype, call.inputs), _split(target, dtype, call.outputs)

    def _staged(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the start of the staging buffer."""
        if self._staging is None or nbytes > self._staging.bytes.size:
            raise ProtocolError(f"an attached process has no buffer for the {nbytes} bytes of its call's arrays")
        return self._staging.bytes[:nbytes]

    # Messages

    def _begin_message(self, call: Call, frame: Frame) -> Reply:
        dtype = dtype_from_code(call.dtype)
        sent, expected = _sizes(call, frame, dtype)
        # Memory of its own: an asynchronous message is under way during the stream's next calls.
        if frame.header.flags & STAGED:
            staged = self._staged(sent + expected)
            memory = staged.copy() if sent else np.empty(expected, np.uint8)
        else:
            memory = ReusableBuffer(0).receive(self._stream, sent) if sent else np.empty(expected, np.uint8)
        array: Array = memory.view(dtype)
        group = self._session.group(call.group)
        blocking = bool(frame.header.flags & BLOCKING)
        options = Options(call.seconds, async_op=not blocking)
        op = "send" if frame.header.kind == Request.SEND else "recv"
        message = group.messages.begin(op, array, call.rank, call.tag, options)
        held = HeldMessage(group, message, None if op == "send" else array)
        self._session.messages[call.number] = held
        return self._wait(call.number, None, frame, own=blocking)

    def _wait(self, number: int, deadline: Deadline | None, frame: Frame, *, own: bool) -> Reply:
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
            return Response.OK, b"", ()
        received = as_bytes(array)
        if frame.header.flags & STAGED:
            self._staged(len(received))[:] = np.frombuffer(received, np.uint8)
        return Response.OK, _SOURCE.pack(message.source()), [received]

    # The store

    def _execute_command(self, request: store_codec.Request) -> Any:
        """Execute a command of the client."""
        store, command = self._session.store, request.command
        if not isinstance(command, Waiting):
            return store.execute(command, request.timeout)
        deadline, failures = Deadline(command.seconds), len(store.failures)
        while True:
            wait = min(_STORE_SLICE_SECONDS, deadline.remaining())
            margin = deadline.remaining() - wait + MARGIN_SECONDS
            try:
                result = store.execute(command.with_timeout(wait), margin)
            except StoreUnresponsiveError:
                raise
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
                if len(store.failures) > failures:  # between two slices
                    raise failed_wait_error(store.failures[failures], error) from None
                if error.ranks or deadline.expired() or self._stream.peer_closed():
                    raise
                continue
            if isinstance(command, commands.QueuePop) and self._stream.peer_closed():
                # The client has gone, so the value goes back to the queue.
                store.undo(command, result)
            return result


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
