"""A stream with a staging buffer between an attached process, played by a test, and an agent that adds 1 to arrays."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import as_bytes
from rankmesh_agent.group.options import Options
from rankmesh_agent.remote.calls import Collective
from rankmesh_agent.remote.codec import encode
from rankmesh_agent.remote.server import serve_calls
from rankmesh_agent.remote.staging import AgentStream, StagedStream
from rankmesh_agent.wire.attach_frames import Kind
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.ops import OpType, ReduceOp
from support.attached import SECONDS

if sys.platform == "linux":
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FLOATS = code_of(np.dtype(np.float32))
MIB = 1 << 20


def memfd(size: int, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("of the test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Recorder:
    """A session whose group adds 1 to the arrays of an all_reduce; and records how long its buffers were."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.rank = 0

    def group(self, number: int) -> Recorder:
        return self

    def ended(self) -> None:
        return None

    def all_reduce(self, array: Any, op: ReduceOp, options: Options) -> None:
        if not array.size:
            raise ValueError("nothing to reduce")
        array += 1
        self.seen.append(array.size)


@contextlib.contextmanager
def served_stream() -> Iterator[tuple[StagedStream, AgentStream, Recorder]]:
    """A process's end of a stream, its agent's, which a thread serves, and the session there."""
    ours, theirs = socket.socketpair()
    process, agent, session = StagedStream(ours), AgentStream(theirs), Recorder()

    def serve() -> None:
        with contextlib.closing(agent):
            serve_calls(session, agent)  # type: ignore[arg-type]

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield process, agent, session
    process.close()
    thread.join(SECONDS)
    assert not thread.is_alive()


def described(count: int, filled: tuple[int, ...] = ()) -> bytes:
    return encode(
        Collective(1, OpType.ALL_REDUCE, 1.0, FLOATS, [count], list(filled), op=ReduceOp.SUM, in_place=not filled)
    )


def all_reduce(process: StagedStream, count: int) -> np.ndarray:
    array = np.arange(count, dtype=np.float32)
    view = as_bytes(array)
    process.send_request(described(count), [view], 0)
    frame = process.receive(None)
    if frame.header.kind == Kind.OK:
        process.receive_arrays(frame.header, [view], 0)
    process.end_request(failed=frame.header.kind != Kind.OK)
    return array
