"""A hostile process attached to an agent: mutated and reordered frames end its own streams, and nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from support.hostile import Script, allocations_within, fuzzed, memory_within, sequences_like

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.net.stream import FramedStream, ReusableBuffer, StreamClosedError
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.remote.call_stream import CallStream
from rankmesh_agent.remote.session import Session
from rankmesh_agent.store import codec, commands
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, HEADER, MAX_DOCUMENT, NO_OP, STAGED, Call, Request
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.ops import OpType, ReduceOp

GROUP = 7
FLOATS = code_of(np.dtype(np.float32))
MEMORY = 64 << 20
"""Bytes that a hostile process makes its agent allocate, at most, besides those that it sends."""


class Agent:
    """An agent alone in its world, as a session knows it."""

    def __init__(self) -> None:
        self._engine = ProgressEngine(0, 1, {}, eager_limit=1 << 12)
        self._engine.wait = lambda ready, deadline: ready()  # type: ignore[method-assign]  # no time passes
        self.world = LocalCommunicator(self._engine, GROUP, "world", (0,), {}, 0.01, FlightRecorder())
        self.member = SimpleNamespace(rank=0)
        self.group_registry = SimpleNamespace(abort_pending=lambda error: None)
        self._table = Table()

    @property
    def store(self) -> Any:
        return _Blocking(self._table)

    def new_group(self, ranks: Any, timeout: float, global_ranks: Any) -> Any:
        return self.world

    def num_waiting(self, seconds: float) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def close(self) -> None:
        self._engine.close(timeout=0.0)


class _Blocking:
    """The agent's store, of which no command waits."""

    failures: tuple[Any, ...] = ()

    def __init__(self, table: Table) -> None:
        self._table = table

    def execute(self, command: Any, seconds: float) -> Any:
        found = command.try_execute(self._table)
        if found is None:
            error = command.timeout_error(self._table)
            error.ranks = (0,)  # which ends the wait, however long the client would wait
            raise error
        return found[0]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def call(what: OpType, outputs: tuple[int, ...], inputs: tuple[int, ...], **fields: Any) -> bytes:
    made = Call(
        **{"group": GROUP, "seconds": 0.01, "tag": 0, "number": 1, "rank": 0, "what": what, "op": ReduceOp.SUM,
           "dtype": FLOATS, "outputs": outputs, "inputs": inputs} | fields
    )  # fmt: skip
    return frame(Request.CALL, attach_frames.encode_call(made), bytes(4 * sum(inputs)))


def frame(kind: int, document: bytes = b"", payload: bytes = b"", flags: int = 0) -> bytes:
    return attach_frames.encode(kind, document, len(payload), flags) + payload


def document(kind: int, **fields: Any) -> bytes:
    return frame(kind, attach_frames.encode_json(fields))


def message(kind: Request, outputs: tuple[int, ...], inputs: tuple[int, ...], rank: int = 0) -> bytes:
    made = Call(GROUP, 0.01, 5, 3, rank, 0, NO_OP, FLOATS, outputs, inputs)
    return frame(kind, attach_frames.encode_call(made), bytes(4 * sum(inputs)), BLOCKING)


ERROR = {"code": "rank-failed", "message": "it failed", "ranks": [0]}
BARRIER = [int(OpType.BARRIER), 0, 0, None, None, None, ""]


def calls() -> Iterator[bytes]:
    """Frames of a stream for calls."""
    yield call(OpType.ALL_REDUCE, (), (16,))
    yield call(OpType.ALL_GATHER, (16,), (16,))
    yield call(OpType.BROADCAST, (16,), ())
    yield call(OpType.REDUCE_SCATTER, (8,), (8,))
    yield call(OpType.ALL_TO_ALL, (4,), (4,))
    yield call(OpType.BARRIER, (), ())
    yield message(Request.SEND, (), (4,))
    yield message(Request.RECEIVE, (4,), ())
    yield frame(Request.WAIT, attach_frames.encode_call(Call(0, -1.0, 0, 3, 0, 0, NO_OP, 0, (), ())))
    for command in (commands.Set("key", b"value"), commands.Get("key", 0.0), commands.MultiGet(("key",), 0.0)):
        yield frame(Request.STORE, codec.encode_command(command, 1))
    staged = attach_frames.encode_call(Call(GROUP, 0.01, 0, 4, 0, OpType.ALL_REDUCE, 0, FLOATS, (), (16,)))
    yield attach_frames.encode(Request.CALL, staged, 64, STAGED)
    yield document(Request.NEW_GROUP, ranks=[0], timeout=1.0)
    yield document(Request.SET_GLOBAL_RANKS, group=GROUP, numbers=[0])
    yield document(Request.SET_TIMEOUT, group=GROUP, timeout=0.01)
    yield document(Request.FAILURE, group=GROUP)
    yield document(Request.NUM_WAITING, seconds=0.01)
    yield document(Request.FAILED_RANKS)
    yield document(Request.VERIFY, group=GROUP, call=BARRIER, engine="outside", details="", seconds=0.01)
    yield document(Request.CANCEL, messages=[1], error=ERROR)
    yield document(Request.LOST_RANKS)
    yield document(Request.RECORD_FAILURE, group=GROUP, error=ERROR)
    yield document(Request.ABORT, error=ERROR)
    yield document(Request.ABORT, group=GROUP, error=ERROR)
    yield document(Request.DROP_GROUP, group=GROUP, reason="done", named=[0])


def stream(*sent: bytes) -> FramedStream:
    return FramedStream(Script(*sent))  # type: ignore[arg-type]


def serve_calls(*sent: bytes) -> None:
    with contextlib.closing(Agent()) as agent:
        CallStream(Session(agent, lambda *_: agent), stream(*sent)).serve()  # type: ignore[arg-type]


def test_mutated_calls_end_in_our_errors(caplog: pytest.LogCaptureFixture) -> None:
    @fuzzed
    @given(sequences_like(list(calls())))
    @example([[frame(Request.FAILURE, b"[" * 100_000)]])
    @example([[frame(Request.FAILURE, b"\xff")]])
    @example([[frame(Request.NUM_WAITING, b'{"seconds": 1' + b"0" * 400 + b"}")]])
    @example([[frame(Request.DROP_GROUP, b'{"group": Infinity}')]])
    @example([[frame(Request.CANCEL, b'{"messages": NaN}')]])
    def run(sequences: list[list[bytes]]) -> None:
        for sent in sequences:
            serve_calls(*sent)

    with memory_within(MEMORY), caplog.at_level(logging.ERROR):
        run()
    assert not caplog.records, caplog.text


def test_nothing_is_allocated_for_a_document_that_has_not_come() -> None:
    head = HEADER.pack(Request.STORE, 0, MAX_DOCUMENT, 0)
    with allocations_within(4 << 20), pytest.raises(StreamClosedError):
        stream(head).receive(None)


def test_nothing_is_allocated_for_arrays_that_have_not_come() -> None:
    lengths = 1 << 38
    described = attach_frames.encode_call(Call(GROUP, 1.0, 0, 0, 0, OpType.ALL_REDUCE, 0, FLOATS, (), (lengths,)))
    with allocations_within(8 << 20):
        serve_calls(HEADER.pack(Request.CALL, 0, len(described), 4 * lengths) + described)
        serve_calls(HEADER.pack(Request.SEND, 0, len(described), 4 * lengths) + described)


def test_memory_grows_with_what_has_come() -> None:
    sent = np.random.default_rng(1).integers(0, 256, 20 << 20, np.uint8)
    buffer = ReusableBuffer(64 << 20)
    for size in (sent.size, 100, 3 << 20, sent.size):
        assert (buffer.receive(stream(sent[:size].tobytes()), size) == sent[:size]).all()
    assert stream(sent.tobytes()).receive_bytes(sent.size) == sent.tobytes()
