"""A hostile process attached to an agent: mutated and reordered frames end its own streams, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from support.hostile import Script, allocations_within, fuzzed, memory_within, sequences_like

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.net.stream import ReusableBuffer, StreamClosedError
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.remote.calls import Cancel, Collective, Message, Verify, Wait
from rankmesh_agent.remote.codec import encode
from rankmesh_agent.remote.requests import (
    Abort,
    DropGroup,
    FailedRanks,
    Failure,
    LostRanks,
    NewGroup,
    NumWaiting,
    RecordFailure,
    Release,
    SetGlobalRanks,
    SetTimeout,
    StoreCommand,
)
from rankmesh_agent.remote.server import serve_calls
from rankmesh_agent.remote.session import Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.store import codec, commands
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import HEADER, MAX_DOCUMENT, STAGED, Kind
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.ops import OpType, ReduceOp
from rankmesh_agent.wire.schemas import LeaseTerms

GROUP = 7
FLOATS = code_of(np.dtype(np.float32))
MEMORY = 64 << 20
"""Bytes that a hostile process makes its agent allocate, at most, besides those that it sends."""


class Agent:
    """An agent alone in its world, as a session knows it."""

    def __init__(self) -> None:
        self._engine = ProgressEngine(0, 1, 1, eager_limit=1 << 12)
        self._engine.wait = lambda ready, *_: ready()  # type: ignore[method-assign]  # no time passes
        self.world = LocalCommunicator(LocalGroupState(self._engine, GROUP, "world", (0,), {}, FlightRecorder()), 0.01)
        self.member = SimpleNamespace(rank=0)
        self.group_registry = SimpleNamespace(abort_pending=lambda error: None)
        self.failed_ranks: list[int] = []
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

    def __init__(self, table: Table) -> None:
        self._table = table

    def execute(self, command: Any, seconds: float) -> Any:
        found = command.try_execute(self._table)
        if found is None:
            raise command.timeout_error(self._table)
        return found[0]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def frame(document: bytes, payload: bytes = b"") -> bytes:
    return attach_frames.encode(Kind.REQUEST, document, len(payload)) + payload


def call(what: OpType, outputs: list[int], inputs: list[int], **fields: Any) -> bytes:
    made = Collective(GROUP, what, 0.01, FLOATS, inputs, outputs, op=ReduceOp.SUM, root=0, **fields)
    return frame(encode(made), bytes(4 * sum(inputs)))


def message(*, sends: bool) -> bytes:
    return frame(encode(Message(GROUP, 3, sends, 0, 5, FLOATS, 4, 0.01, blocking=True)), bytes(16 if sends else 0))


ERROR = {"code": "rank-failed", "message": "it failed", "ranks": [0]}


def calls() -> Iterator[bytes]:
    """Frames of a stream for calls."""
    yield call(OpType.ALL_REDUCE, [], [16], in_place=True)
    yield call(OpType.ALL_GATHER, [16], [16])
    yield call(OpType.BROADCAST, [16], [])
    yield call(OpType.REDUCE_SCATTER, [8], [8])
    yield call(OpType.ALL_TO_ALL, [4], [4])
    yield call(OpType.EMPTY, [], [], count=16)
    yield call(OpType.BARRIER, [], [])
    yield message(sends=True)
    yield message(sends=False)
    for command in (commands.Set("key", b"value"), commands.Get("key", 0.0), commands.MultiGet(("key",), 0.0)):
        yield frame(encode(StoreCommand(bytes(codec.encode_command(command, 1)))))
    staged = encode(Collective(GROUP, OpType.ALL_REDUCE, 0.01, FLOATS, [16], []))
    yield attach_frames.encode(Kind.REQUEST, staged, 64, STAGED)
    for request in (
        Wait(3, None, own=False),
        NewGroup([0], 1.0, [0]),
        SetGlobalRanks(GROUP, [0], world=False),
        SetTimeout(GROUP, 0.01),
        Failure(GROUP),
        Failure(naming=[0]),
        NumWaiting(0.01),
        FailedRanks(),
        Verify(GROUP, "outside", 0.01, "", OpType.BARRIER, 0, 0, None, None, None, ""),
        Cancel(1, ERROR, waited=False),
        LostRanks(),
        RecordFailure(GROUP, ERROR),
        Release("done", raised=False, exit_text=""),
        Abort(ERROR),
        Abort(ERROR, GROUP),
        DropGroup(GROUP, b"done"),
    ):
        yield frame(encode(request))


def stream(*sent: bytes) -> AgentStream:
    return AgentStream(Script(*sent))  # type: ignore[arg-type]


class Leases:
    """The lease of an agent, as a session knows it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def acquire(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(end_reason=None)

    def grow(self, *_: Any) -> Agent:
        return self._agent


def serve(*sent: bytes) -> None:
    with contextlib.closing(Agent()) as agent:
        served = stream(*sent)
        session = Session(Leases(agent), served, LeaseTerms("job", 0, 1, 1.0, ""))  # type: ignore[arg-type]
        session.enter(agent)  # type: ignore[arg-type]
        serve_calls(session, served)


def test_mutated_calls_end_in_our_errors(caplog: pytest.LogCaptureFixture) -> None:
    @fuzzed
    @given(sequences_like(list(calls())))
    @example([[frame(b"\x91" * 100_000)]])
    @example([[frame(b"\xff")]])
    @example([[frame(encode({"type": "NumWaiting", "seconds": 1e300}))]])
    @example([[frame(encode({"type": "DropGroup", "group": math.inf}))]])
    @example([[frame(encode({"type": "Cancel", "number": math.nan}))]])
    def run(sequences: list[list[bytes]]) -> None:
        for sent in sequences:
            serve(*sent)

    with memory_within(MEMORY), caplog.at_level(logging.ERROR):
        run()
    assert not caplog.records, caplog.text


def test_nothing_is_allocated_for_a_document_that_has_not_come() -> None:
    head = HEADER.pack(Kind.REQUEST, 0, MAX_DOCUMENT, 0)
    with allocations_within(4 << 20), pytest.raises(StreamClosedError):
        stream(head).receive(None)


def test_nothing_is_allocated_for_arrays_that_have_not_come() -> None:
    lengths = 1 << 38
    collective = Collective(GROUP, OpType.ALL_REDUCE, 1.0, FLOATS, [lengths], [])
    with allocations_within(8 << 20):
        for request in (collective, Message(GROUP, 3, True, 0, 5, FLOATS, lengths, 1.0, blocking=True)):
            serve(attach_frames.encode(Kind.REQUEST, encode(request), 4 * lengths))


def test_memory_grows_with_what_has_come() -> None:
    sent = np.random.default_rng(1).integers(0, 256, 20 << 20, np.uint8)
    buffer = ReusableBuffer(64 << 20)
    for size in (sent.size, 100, 3 << 20, sent.size):
        assert (buffer.receive(stream(sent[:size].tobytes()), size) == sent[:size]).all()
    assert stream(sent.tobytes()).receive_bytes(sent.size) == sent.tobytes()
